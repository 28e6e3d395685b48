"""Chooses the data-parallel rank of each request, by the ranks' loads and their cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mooncake_engine.messages import EngineRequest, TokenUpdate

DECODE_TOKENS = 32
"""Cost of a decoding request, in prompt tokens that would delay a new request equally: it takes one
token of each step until it ends."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A live request: its rank, and its remaining cost there, in tokens."""

    dp_rank: int
    cost: int
    group: str | None


class RequestPlacement:
    """Tracks the ranks of live requests, and places new ones.

    Args:
        dp_size: number of data-parallel ranks.
    """

    def __init__(self, dp_size: int) -> None:
        self._costs = [0] * dp_size
        self._live: dict[str, _Placed] = {}
        self._groups: dict[str, list[str]] = {}  # live requests of one prompt, all on one rank

    def has_sibling(self, request: EngineRequest) -> bool:
        """Whether another choice of its prompt decides on the rank of a new request."""
        return request.group in self._groups

    def place(self, request: EngineRequest, cached: Sequence[int]) -> int:
        """Place a new request on the rank that is likely to answer first, unless it names one.

        Args:
            request: the request; it counts as live from now on.
            cached: for each rank, number of its prompt tokens that are cached; if it has a
                sibling, this is ignored.
        """
        num_tokens = len(request.prompt_token_ids)
        if request.kv_transfer_params.loads_kv:
            num_tokens, cached = 0, [0] * len(cached)  # a peer computes it
        members = self._groups.get(request.group or "", [])
        if members:
            dp_rank, num_tokens = self._live[members[0]].dp_rank, 0  # the prompt runs once
        elif request.data_parallel_rank is not None:
            dp_rank = request.data_parallel_rank
        else:
            ranks = range(len(cached))
            dp_rank = min(ranks, key=lambda rank: self._costs[rank] - cached[rank])
        cost = max(num_tokens - cached[dp_rank], 0) + DECODE_TOKENS
        self._live[request.request_id] = _Placed(dp_rank, cost, request.group)
        self._costs[dp_rank] += cost
        if request.group is not None:
            self._groups.setdefault(request.group, []).append(request.request_id)
        return dp_rank

    def note(self, update: TokenUpdate) -> None:
        """Update the cost of a request that has got its first token or has ended."""
        if update.finish is not None:
            self.remove(update.request_id)
        elif update.token_ids:
            placed = self._live.get(update.request_id)
            if placed is not None and placed.cost > DECODE_TOKENS:
                self._costs[placed.dp_rank] -= placed.cost - DECODE_TOKENS
                self._live[update.request_id] = replace(placed, cost=DECODE_TOKENS)

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended. Idempotent."""
        placed = self._live.pop(request_id, None)
        if placed is None:
            return
        self._costs[placed.dp_rank] -= placed.cost
        if placed.group is not None:
            members = self._groups[placed.group]
            members.remove(request_id)
            if not members:
                del self._groups[placed.group]
