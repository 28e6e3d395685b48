"""Data-parallel ranks: parts of an instance with requests and KV of their own behind one address.

A request may name its rank in a header, as with vLLM; otherwise the instance chooses one. If the
routing policy considers prefixes or sessions, the proxy chooses the rank with the same policy that
chooses the instance, by each rank's load and prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from mooncake_api import instance_protocol

DP_RANK_HEADER = instance_protocol.DP_RANK_HEADER.lower().encode()
# Bound of the number of ranks that an instance reports; a larger number would be a mistake.
MAX_DP_RANKS = 1024


class RankQueue(Struct, frozen=True):
    """Requests running and waiting on a data-parallel rank, from the instance's health endpoint.

    They include requests for which the proxy has not chosen the rank.
    """

    running: int = 0
    waiting: int = 0


class RequestLoad:
    """Requests that this proxy has in flight on an instance or rank."""

    __slots__ = ("num_elsewhere", "num_prompt_tokens", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        self.num_prompt_tokens = 0
        # The same two counts for the other worker processes, as they report them.
        self.num_elsewhere = (0, 0)

    @property
    def total_running(self) -> int:
        """Requests in flight from all worker processes."""
        return self.num_running + self.num_elsewhere[0]

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of those requests."""
        return self.num_prompt_tokens + self.num_elsewhere[1]


class DPRank(RequestLoad):
    """One data-parallel rank. Its load is that of requests for which this proxy has chosen it.

    Implements `policies.Candidate`.
    """

    __slots__ = ("header", "name", "number", "queue")
    relative_speed = 1.0

    def __init__(self, instance: str, number: int) -> None:
        super().__init__()
        self.number = number
        # Can't collide with an instance's name, which is a URL without a fragment.
        self.name = f"{instance}#{number}"
        self.header = b"%b: %d\r\n" % (DP_RANK_HEADER, number)
        self.queue = RankQueue()


class DPRanks:
    """All data-parallel ranks of an instance that has at least two."""

    def __init__(self, instance: str, size: int) -> None:
        self._ranks = tuple(DPRank(instance, number) for number in range(min(size, MAX_DP_RANKS)))

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[DPRank]:
        return iter(self._ranks)

    def note_queues(self, queues: Sequence[RankQueue]) -> None:
        """Update the queues that the instance reports, in the order of its ranks."""
        for rank, queue in zip(self._ranks, queues, strict=False):
            rank.queue = queue

    def named(self, given: bytes | str) -> DPRank | None:
        """The rank that a client's header names; None if it does not exist."""
        if not given.isdigit() or len(given) > 4 or int(given) >= len(self._ranks):
            return None
        return self._ranks[int(given)]
