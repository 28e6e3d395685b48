"""The admission queue: bounds how many requests run at once, with fair shares between API keys.

The order follows virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
OSDI'24): the next request is one of the key with the least cost so far, relative to its weight;
what a request used replaces the cost expected of it when it ends. The requests of one key are
served first come, first served. Counters are compared with a virtual time as in start-time fair
queueing (Goyal et al., SIGCOMM'96): a key that was idle has no credit, and what a key was served
while nobody waited is no debt.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_proxy.api.api_keys import NoKey
from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.errors import Overloaded


class Tenant(Protocol):
    """An API key, as far as the queue needs it."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def weight(self) -> float:
        """Weight of its share."""


NO_KEY = NoKey()


@dataclass(slots=True)
class _TenantQueue:
    """The queue of one tenant.

    Args:
        weight: weight of its share.
        served: virtual counter: tokens served so far, divided by the weight.
        joined_at: the virtual time when it last began to compete; `served` never falls below it.
        waiting: the waiting requests' futures in their order, and each one's cost in tokens.
    """

    weight: float
    served: float = 0.0
    joined_at: float = 0.0
    waiting: OrderedDict[asyncio.Future[bool], float] = field(default_factory=OrderedDict)


class AdmissionQueue:
    """The queue of one worker process. Each admitted request must call `leave` once.

    Costs are in tokens.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        # Whether requests may have to wait, so that costs matter.
        self.is_bounded = config.max_running > 0
        self._queues: dict[str, _TenantQueue] = {}
        # The greatest counter that a tenant had when a request of it started, of those that compete
        # now. A tenant whose requests begin to wait starts from it.
        self._virtual_time = 0.0
        # The greatest counter of all tenants.
        self._most_served = 0.0
        self.num_running = 0
        self.num_waiting = 0

    def enter(self, tenant: Tenant = NO_KEY, cost: float = 1.0) -> bool:
        """Admit a request immediately if possible. If False, the caller must await `queue`."""
        if not self.is_bounded:
            self.num_running += 1
            return True
        if self.num_running >= self._config.max_running or self.num_waiting:
            return False
        queue = self._queue_of(tenant)
        self._join(queue)
        self._charge(queue, cost)
        self.num_running += 1
        return True

    def check_room(self, tenant: Tenant = NO_KEY) -> None:
        """Check that a request would be admitted or queued now, before its prompt costs any work.

        Raises:
            Overloaded: the queue is full.
        """
        config = self._config
        if self.num_waiting < config.max_waiting or self.num_running < config.max_running:
            return
        if self.is_bounded and self._displaced_by(self._queue_of(tenant)) is None:
            raise self._full()

    def leave(self, tenant: Tenant = NO_KEY, unspent: float = 0.0) -> None:
        """End a request, and admit the next one.

        Args:
            tenant: the key that the request was charged to.
            unspent: how much of its cost it did not use; negative if it used more. Most clients
                don't say how long an answer may be, or say far more than they get.
        """
        if unspent and self.is_bounded:
            queue = self._queue_of(tenant)
            queue.served = max(queue.joined_at, queue.served - unspent / queue.weight)
            self._most_served = max(self._most_served, queue.served)
        while self.num_waiting:
            queue = min((t for t in self._queues.values() if t.waiting), key=lambda t: t.served)
            turn, cost = queue.waiting.popitem(last=False)
            self.num_waiting -= 1
            if not turn.done():
                self._charge(queue, cost)
                turn.set_result(True)
                return
        self.num_running -= 1

    async def queue(self, tenant: Tenant = NO_KEY, cost: float = 1.0) -> None:
        """Wait until admitted. A request whose client disconnects is removed from the queue.

        Raises:
            Overloaded: the queue is full, or the request has waited for too long.
        """
        config, queue = self._config, self._queue_of(tenant)
        if self.num_waiting >= config.max_waiting and not self._make_room_for(queue):
            raise self._full()
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        if not queue.waiting:
            self._join(queue)
        queue.waiting[turn] = cost
        self.num_waiting += 1
        timer = loop.call_later(config.max_wait_s, _answer, turn, False)
        try:
            is_admitted = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and not turn.exception() and turn.result():
                self.leave(tenant, cost)
            raise
        finally:
            timer.cancel()
            if queue.waiting.pop(turn, None) is not None:
                self.num_waiting -= 1
        if not is_admitted:
            raise Overloaded(
                f"waited {config.max_wait_s:g} s in the queue (--max-wait)",
                retry_after_s=self._retry_after(),
            )

    def set_weights(self, tenants: Iterable[Tenant]) -> None:
        """Apply changed weights. What a tenant has been served so far still counts."""
        for tenant in tenants:
            if (queue := self._queues.get(tenant.name)) is not None:
                queue.weight = tenant.weight

    def _queue_of(self, tenant: Tenant) -> _TenantQueue:
        queue = self._queues.get(tenant.name)
        if queue is None:
            queue = self._queues[tenant.name] = _TenantQueue(tenant.weight)
        return queue

    def _join(self, queue: _TenantQueue) -> None:
        """Let a tenant without waiting requests compete from now on: with those that have waiting
        requests, or with all others from the same counter if there are none."""
        if not self.num_waiting:
            self._virtual_time = self._most_served
        queue.joined_at = self._virtual_time
        queue.served = max(queue.served, queue.joined_at)

    def _charge(self, queue: _TenantQueue, cost: float) -> None:
        self._virtual_time = max(self._virtual_time, queue.served)
        queue.served += cost / queue.weight
        self._most_served = max(self._most_served, queue.served)

    def _make_room_for(self, newcomer: _TenantQueue) -> bool:
        """Drop the latest request of the tenant with the most waiting requests, by weight.

        Returns:
            False if the newcomer itself is that tenant: nothing is dropped.
        """
        longest = self._displaced_by(newcomer)
        if longest is None:
            return False
        turn, _ = longest.waiting.popitem()
        self.num_waiting -= 1
        if not turn.done():
            turn.set_exception(self._full())
        return True

    def _displaced_by(self, newcomer: _TenantQueue) -> _TenantQueue | None:
        """The tenant with the most waiting requests, by weight; None if that is the newcomer."""
        longest = max(self._queues.values(), key=lambda t: len(t.waiting) / t.weight)
        share = (len(newcomer.waiting) + 1) / newcomer.weight
        return longest if len(longest.waiting) / longest.weight > share else None

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{self.num_running} requests are running and {self.num_waiting} waiting "
            "(--max-running, --max-waiting): try again later",
            retry_after_s=self._retry_after(),
        )

    def _retry_after(self) -> int:
        return max(1, math.ceil(self._config.max_wait_s / 2))


def _answer(turn: asyncio.Future[bool], is_admitted: bool) -> None:
    if not turn.done():
        turn.set_result(is_admitted)
