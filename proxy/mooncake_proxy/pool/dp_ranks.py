"""Data-parallel ranks of an instance: each has requests and KV of its own behind the one address.

A request may name its rank by a header, as vLLM has it; otherwise the instance chooses one. Where
the policy looks at prefixes or sessions the proxy names the rank, chosen among those of an instance
as instances are: by the same policy, on each rank's load and prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

DP_RANK_HEADER = b"x-data-parallel-rank"
# An instance says itself how many it has: more than any that there is are a mistake of its own.
MAX_DP_RANKS = 1024


class RankQueue(Struct, frozen=True):
    """What an instance's health says of a data-parallel rank: requests in its steps and its queue,
    whoever chose the rank."""

    running: int = 0
    waiting: int = 0


class RequestLoad:
    """Requests in flight somewhere, as this proxy knows them."""

    __slots__ = ("num_elsewhere", "num_prompt_tokens", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        self.num_prompt_tokens = 0
        # The same two counts as the other worker processes report them.
        self.num_elsewhere = (0, 0)

    @property
    def total_running(self) -> int:
        """Requests on it from all worker processes."""
        return self.num_running + self.num_elsewhere[0]

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of those requests."""
        return self.num_prompt_tokens + self.num_elsewhere[1]


class DPRank(RequestLoad):
    """One data-parallel rank. Its load is that of requests to which this proxy has named it; see
    ``policies.Candidate``."""

    __slots__ = ("header", "name", "number", "queue")
    relative_speed = 1.0

    def __init__(self, instance: str, number: int) -> None:
        super().__init__()
        self.number = number
        # No instance has such a name.
        self.name = f"{instance}#{number}"
        self.header = b"%b: %d\r\n" % (DP_RANK_HEADER, number)
        self.queue = RankQueue()


class DPRanks:
    """All data-parallel ranks of an instance, two at least."""

    def __init__(self, instance: str, size: int) -> None:
        self._ranks = tuple(DPRank(instance, number) for number in range(min(size, MAX_DP_RANKS)))

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[DPRank]:
        return iter(self._ranks)

    def note_queues(self, queues: Sequence[RankQueue]) -> None:
        """What the instance says of its ranks, in order."""
        for rank, queue in zip(self._ranks, queues, strict=False):
            rank.queue = queue

    def named(self, given: bytes | str) -> DPRank | None:
        """The rank that a client's header names; None if there is none such."""
        if not given.isdigit() or len(given) > 4 or int(given) >= len(self._ranks):
            return None
        return self._ranks[int(given)]
