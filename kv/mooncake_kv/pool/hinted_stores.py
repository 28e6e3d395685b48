"""Stores that requests name, beside those of the configuration: where a proxy believes KV to be.

What a request says of a store is a hint. It is tried once, within the request's patience, and
whatever is wrong with it is a miss: a store that is gone, was restarted, has less than was said, or
replies too late. Only a store that proves to know the deployment's secret is asked at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mooncake_kv.params import PrefixSource
from mooncake_kv.store.chunk_store import ChunkStore, Residence
from mooncake_kv.store.store_client import StoreClient

logger = logging.getLogger(__name__)

MAX_HINTED_STORES = 32
"""Connected to at a time; each costs a session and a thread."""
IDLE_S = 120.0
"""A store that nobody has named for so long is left."""
LOST_S = 10.0
"""The same for one that does not reply."""
SWEEP_S = 5.0
CONNECT_POLL_S = 0.002

Connect = Callable[[str, int], StoreClient]


@dataclass(slots=True, eq=False)
class _Hinted:
    """A store that was named.

    Args:
        number: its name for sources of chunks; never given to another one.
        client: to it.
        used_at: when it was named or read last.
        was_in_vain: somebody has waited for it: nobody else does until it is connected to.
    """

    number: int
    client: StoreClient
    used_at: float
    was_in_vain: bool = False


class HintedStores:
    """Used by the pool client's loop thread alone, ``close`` excepted.

    Args:
        own: the stores of the configuration, whose numbers come first.
        connect: to a store of this deployment.
        count: told what became of each hint.
        on_left: told the number of a store that is not used any more.
    """

    def __init__(
        self,
        own: Sequence[ChunkStore],
        connect: Connect,
        count: Callable[[str], None],
        on_left: Callable[[int], None],
    ) -> None:
        self._own = own
        self._connect = connect
        self._count = count
        self._on_left = on_left
        self._next = len(own)
        self._by_address: dict[tuple[str, int], _Hinted] = {}

    def use(self, number: int) -> ChunkStore | None:
        """The store of that number, if there still is one; its chunks are going to be read."""
        for hinted in self._by_address.values():
            if hinted.number == number:
                hinted.used_at = time.monotonic()
                return hinted.client
        return None

    async def probe(
        self, hints: Sequence[PrefixSource], keys: Sequence[bytes], patience_s: float
    ) -> list[tuple[int, list[Residence]]]:
        """What the stores that are named have of these chunks, by their numbers; those that reply
        within ``patience_s``."""
        deadline = time.monotonic() + patience_s
        answers = await asyncio.gather(*(self._probe(hint, keys, deadline) for hint in hints))
        return list({found[0]: found for found in answers if found is not None}.values())

    async def tidy(self) -> None:
        """Leave stores that are not named any more; for as long as the loop runs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep(time.monotonic())

    def close(self) -> None:
        """Leave all; after the loop has ended. Idempotent."""
        clients = [hinted.client for hinted in self._by_address.values()]
        self._by_address.clear()
        if clients:
            with ThreadPoolExecutor(len(clients)) as pool:
                list(pool.map(StoreClient.close, clients))

    async def _probe(
        self, hint: PrefixSource, keys: Sequence[bytes], deadline: float
    ) -> tuple[int, list[Residence]] | None:
        arenas = (store.arena for store in self._own)
        if any(arena is not None and arena.epoch == hint.epoch for arena in arenas):
            self._count("own")  # which every look-up asks
            return None
        hinted = self._find(hint)
        if hinted is None:
            self._count("too_many")
            return None
        client = hinted.client
        # Another thread connects.
        while client.arena is None and not hinted.was_in_vain and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(CONNECT_POLL_S)
        arena = client.arena
        hinted.was_in_vain = arena is None
        if arena is None:
            self._count("unreachable")
            return None
        if arena.epoch != hint.epoch:
            self._count("restarted")
            return None
        asked = asyncio.wrap_future(client.probe(keys))
        done, _ = await asyncio.wait({asked}, timeout=max(deadline - time.monotonic(), 0.0))
        if not done:
            self._count("late")
            return None
        found = asked.result()
        has_some = found[:1] not in ([], [Residence.ABSENT])
        self._count("found" if has_some else "nothing_there")
        return hinted.number, found

    def _find(self, hint: PrefixSource) -> _Hinted | None:
        """The store of a hint, connected to or soon; None if there are too many."""
        now, address = time.monotonic(), (hint.host, hint.port)
        for hinted in self._by_address.values():
            arena = hinted.client.arena
            if arena is not None and arena.epoch == hint.epoch:
                hinted.used_at = now
                return hinted
        if address not in self._by_address:
            if len(self._by_address) >= MAX_HINTED_STORES:
                self._sweep(now)
            if len(self._by_address) >= MAX_HINTED_STORES:
                return None
            self._by_address[address] = _Hinted(self._next, self._connect(*address), now)
            self._next += 1
        hinted = self._by_address[address]
        if hinted.client.arena is not None:
            hinted.used_at = now
        return hinted

    def _sweep(self, now: float) -> None:
        for address, hinted in list(self._by_address.items()):
            limit_s = IDLE_S if hinted.client.arena is not None else LOST_S
            if now - hinted.used_at > limit_s:
                self._on_left(hinted.number)
                del self._by_address[address]
                asyncio.get_running_loop().run_in_executor(None, hinted.client.close)
