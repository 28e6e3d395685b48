"""The hits of requests in the KVCache pool: which chunks of their prompts it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.request_queues import RequestQueue
from mooncake_kv.pool.pool_costs import LoadChoice
from mooncake_kv.pool.pool_events import ChunkSource


@dataclass(slots=True, eq=False)
class PoolHit:
    """The chunks of a request's prompt that the pool has.

    Args:
        request: the request.
        keys: keys of its leading chunks.
        sources: sources of the chunks that were found, a prefix of ``keys``.

    Attributes:
        choice: the last decision between loading and computing; None before the first.
        chosen_at: when it was made, in seconds.
        num_cached: tokens in the device's prefix cache that it assumes.
    """

    request: Request
    keys: Sequence[bytes]
    sources: Sequence[ChunkSource]
    choice: LoadChoice | None = None
    chosen_at: float = 0.0
    num_cached: int = 0


class PoolHits:
    """The hits of requests that wait for their turn. The scheduler owns one; it stays empty if the
    instance uses no KVCache pool.

    While a waiting request has a hit, each step looks for loads to start early. So a hit is dropped
    once its request's turn has dealt with it, or when the request ends or follows a sibling.
    """

    def __init__(self) -> None:
        self._hits: dict[str, PoolHit] = {}
        self._in_order = RequestQueue()

    def __contains__(self, request: Request) -> bool:
        return request in self._in_order

    def __getitem__(self, request: Request) -> PoolHit:
        return self._hits[request.request_id]

    def add(self, hit: PoolHit) -> None:
        """Add a request's hit, in place of an earlier one."""
        if hit.request not in self:
            self._in_order.push(hit.request)
        self._hits[hit.request.request_id] = hit

    def drop(self, request: Request) -> None:
        """Drop a request's hit, if it has one."""
        if request in self:
            self._in_order.remove(request)
            del self._hits[request.request_id]

    def has_any_in(self, waiting: RequestQueue) -> bool:
        """Whether a request in this queue has a hit; drops the hits of more urgent requests, which
        have left it to follow a sibling."""
        while request := self._in_order.peek():
            if request in waiting:
                return True
            self.drop(request)
        return False
