"""Telling peers that this instance lives, as often as the shorter of two leases asks for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mooncake_engine.kv_transfer.context import Spawn
from mooncake_engine.kv_transfer.params import RemoteKV
from mooncake_engine.timing import timeout

SIGNS_PER_LEASE = 6
SHORTEST_PAUSE_S = 0.02
"""Whatever lease a request names."""


class HasRemote(Protocol):
    """Something that a peer holds for us, or waits for."""

    @property
    def remote(self) -> RemoteKV:
        """What, and where."""
        ...


Item = TypeVar("Item", bound=HasRemote)
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Interval:
    """How often signs are given.

    Args:
        lease_s: how long this instance itself waits.
        longest_s: the longest pause, however long the leases are.
    """

    lease_s: float
    longest_s: float = float("inf")

    def of(self, remotes: Iterable[RemoteKV]) -> float:
        """The pause that the shortest lease bears, of these peers' and ours."""
        leases = (remote.lease_s for remote in remotes if remote.lease_s is not None)
        shortest_s = min((self.lease_s, *leases))
        return max(min(shortest_s / SIGNS_PER_LEASE, self.longest_s), SHORTEST_PAUSE_S)


class SignsOfLife(Generic[Item]):
    """One message per peer and pause; a silent peer delays no other. Loop thread only.

    Args:
        interval: how often.
        tell: gives a peer its sign, for items by request id, within so many seconds.
        spawn: runs a task on the loop.
    """

    def __init__(
        self,
        interval: Interval,
        tell: Callable[[dict[str, Item], float], Awaitable[None]],
        spawn: Spawn,
    ) -> None:
        self._interval = interval
        self._tell = tell
        self._spawn = spawn
        self._being_told: set[_Key] = set()
        self._pause_s = 0.0
        self._is_shorter = asyncio.Event()

    def hasten(self, remote: RemoteKV) -> None:
        """A peer is concerned from now on, whose lease may bear no pause as long as this one."""
        if self._interval.of([remote]) < self._pause_s:
            self._is_shorter.set()

    async def give(self, concerned: Callable[[], Mapping[str, Item]]) -> None:
        """Tell every peer, again and again, what of its is concerned at the time; until
        cancelled."""
        while True:
            await self._pause(concerned)
            by_peer: defaultdict[_Key, dict[str, Item]] = defaultdict(dict)
            for request_id, item in concerned().items():
                remote = item.remote
                by_peer[remote.engine_id, remote.host, remote.port][request_id] = item
            for key, group in by_peer.items():
                if key not in self._being_told:
                    self._being_told.add(key)
                    self._spawn(self._tell_one(key, group))

    async def _tell_one(self, key: _Key, group: dict[str, Item]) -> None:
        try:
            await self._tell(group, self._interval.of(item.remote for item in group.values()))
        finally:
            self._being_told.discard(key)

    async def _pause(self, concerned: Callable[[], Mapping[str, Item]]) -> None:
        """Wait until the next sign is due; a shorter lease that comes meanwhile cuts it short."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._pause_s = self._longest_pause(concerned())
        while (left_s := began + self._pause_s - loop.time()) > 0:
            self._is_shorter.clear()
            with suppress(asyncio.TimeoutError):
                async with timeout(left_s):
                    await self._is_shorter.wait()
            self._pause_s = min(self._pause_s, self._longest_pause(concerned()))

    def _longest_pause(self, concerned: Mapping[str, Item]) -> float:
        return self._interval.of(item.remote for item in concerned.values())
