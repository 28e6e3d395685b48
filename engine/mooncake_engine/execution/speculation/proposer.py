"""What guesses tokens ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from mooncake_engine.execution.request_state import RequestState
from mooncake_engine.execution.speculation.continuation import Draft


class Wanted(NamedTuple):
    """A request that may have tokens guessed for it.

    Args:
        state: its tokens so far; its block table has room for the guesses.
        num_tokens: at most so many, at least one.
    """

    state: RequestState
    num_tokens: int


class Proposer(Protocol):
    """Guesses tokens. Every rank makes the same guesses from the same requests."""

    def propose(self, wanted: Sequence[Wanted]) -> dict[str, Draft]:
        """Drafts by request id; none for those about whom there is nothing to say.

        In the step that calls it the model has not run yet: a request's last token has no KV.
        """
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or begin anew; unknown ids are normal."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...
