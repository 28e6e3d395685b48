"""Draft tokens of a step: what proposes them, and what the model accepts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from mooncake_engine.execution.penalties import TokenCounts
from mooncake_engine.execution.request_table import (
    CachedRequest,
    GrammarState,
    SamplingState,
)
from mooncake_engine.execution.speculation.rejection_sampling import DraftToken, count_accepted
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import SampledToken, StepPlan

if TYPE_CHECKING:
    from mooncake_engine.execution.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """What the sampler looks at of a request, some draft tokens later."""

    sampling: SamplingParams
    seed: int
    num_output_tokens: int
    counts: TokenCounts | None
    grammar: GrammarState | None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens for one request.

    Args:
        states: the request before each draft token, and after the last.
        draft_tokens: at least one.
    """

    states: Sequence[SamplingState]
    draft_tokens: Sequence[DraftToken]

    @property
    def token_ids(self) -> list[int]:
        """The drafted tokens."""
        return [draft_token.token_id for draft_token in self.draft_tokens]


def advance(state: SamplingState, token_id: int) -> DraftState | None:
    """The request one token later; None if its grammar does not allow the token."""
    grammar = state.grammar
    if grammar is not None:
        grammar = grammar.after(token_id)
        if grammar is None:
            return None
    counts = None if state.counts is None else state.counts.after(token_id)
    return DraftState(state.sampling, state.seed, state.num_output_tokens + 1, counts, grammar)


def make_draft(state: CachedRequest, token_ids: Iterable[int]) -> Draft | None:
    """A draft of these tokens, as far as the request's grammar lets it; None if not at all."""
    states: list[SamplingState] = [state]
    draft_tokens: list[DraftToken] = []
    for token_id in token_ids:
        following = advance(states[-1], token_id)
        if following is None:
            break
        states.append(following)
        draft_tokens.append(DraftToken(token_id))
    return Draft(states, draft_tokens) if draft_tokens else None


class DraftRequest(NamedTuple):
    """A request that may have tokens drafted for it.

    Args:
        state: its tokens so far; its block table has room for the draft tokens.
        num_tokens: how many at most, at least one.
    """

    state: CachedRequest
    num_tokens: int


class Proposer(Protocol):
    """Proposes draft tokens. Every rank makes the same draft tokens from the same requests."""

    def propose(self, wanted: Sequence[DraftRequest]) -> dict[str, Draft]:
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


def propose_drafts(
    proposer: Proposer, plan: StepPlan, states: Sequence[CachedRequest]
) -> dict[str, Draft]:
    """Draft tokens for the plan's sequences that may have some, by request id."""
    wanted = [
        DraftRequest(state, sequence.num_draft_tokens)
        for sequence, state in zip(plan.sequences, states, strict=True)
        if sequence.num_draft_tokens
    ]
    return proposer.propose(wanted) if wanted else {}


def verify_drafts(
    sampler: Sampler,
    logits: Tensor,
    states: Sequence[CachedRequest],
    drafts: Mapping[str, Draft],
) -> dict[str, tuple[SampledToken, ...]]:
    """The tokens of each request: the draft tokens that hold, and the one behind them.

    Args:
        sampler: chooses.
        logits: [rows, vocab] float32: of each request one row, or with a draft one before each
            draft token and one behind the last.
        states: the requests.
        drafts: by request id.
    """
    rows: list[SamplingState] = []
    draft_tokens: dict[int, DraftToken] = {}
    for state in states:
        draft = drafts.get(state.request_id)
        if draft is not None:
            known = enumerate(draft.draft_tokens, start=len(rows))
            draft_tokens.update(
                (row, draft_token)
                for row, draft_token in known
                if draft_token.distribution is not None
            )
        rows += [state] if draft is None else draft.states
    sampled = iter(sampler.sample(logits, rows, draft_tokens))
    return {state.request_id: _accepted(sampled, drafts.get(state.request_id)) for state in states}


def _accepted(sampled: Iterator[SampledToken], draft: Draft | None) -> tuple[SampledToken, ...]:
    """What a request keeps of its rows' tokens, all of which are taken from ``sampled``."""
    if draft is None:
        return (next(sampled),)
    tokens = tuple(islice(sampled, len(draft.states)))
    num_accepted = count_accepted(draft.draft_tokens, [token.token_id for token in tokens])
    return tokens[: num_accepted + 1]
