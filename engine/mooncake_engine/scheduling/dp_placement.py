"""Which data-parallel rank serves a request: by what each has to do, and which prefixes it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mooncake_engine.messages import EngineRequest, TokenUpdate

DECODE_TOKENS = 32
"""A request that decodes delays a new one about as much as so many tokens of a prompt: it takes one
token of each step until it ends."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A live request: where, and what it still costs there, in tokens."""

    dp_rank: int
    cost: int
    group: str | None


class RequestPlacement:
    """Where live requests are, and where the next one goes.

    Args:
        dp_size: data-parallel ranks.
    """

    def __init__(self, dp_size: int) -> None:
        self._costs = [0] * dp_size
        self._live: dict[str, _Placed] = {}
        self._groups: dict[str, list[str]] = {}  # live requests of one prompt, which stay together

    def place(self, request: EngineRequest, cached: Sequence[int]) -> int:
        """The rank that is likely to answer first, unless the request names one.

        Args:
            request: is live from now on.
            cached: by rank, tokens of its prompt that need no computing.
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
        """A request has come on, or has ended."""
        if update.finish is not None:
            self.remove(update.request_id)
        elif update.token_ids:
            placed = self._live.get(update.request_id)
            if placed is not None and placed.cost > DECODE_TOKENS:
                self._costs[placed.dp_rank] -= placed.cost - DECODE_TOKENS
                self._live[update.request_id] = replace(placed, cost=DECODE_TOKENS)

    def remove(self, request_id: str) -> None:
        """A request has ended. Idempotent."""
        placed = self._live.pop(request_id, None)
        if placed is None:
            return
        self._costs[placed.dp_rank] -= placed.cost
        if placed.group is not None:
            members = self._groups[placed.group]
            members.remove(request_id)
            if not members:
                del self._groups[placed.group]
