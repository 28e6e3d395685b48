"""Stores that requests name, beside those of the configuration: where a proxy believes KV to be.

What a request says of a store is a hint. It is tried once, within the request's patience, and
whatever is wrong with it is a miss: a store that is gone, was restarted, has less than was said, or
replies too late. Only a store that proves to know the deployment's secret is asked at all; without
a secret everybody does, so that only stores of this host are, or of hosts that the operator names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mooncake_kv.addresses import addresses_of
from mooncake_kv.allowed_hosts import AllowedHosts, plain_address
from mooncake_kv.params import PrefixSource
from mooncake_kv.store.chunk_store import ArenaInfo, ChunkStore, Residence
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


class HintRule:
    """Which stores a request may name.

    Args:
        allowed: see ``AllowedHosts``; empty allows every host if a store has to prove that it knows
            a secret, else this one.
        has_secret: whether it has to.

    Raises:
        KVConfigError: one of them can be neither.
    """

    def __init__(self, allowed: Sequence[str], *, has_secret: bool) -> None:
        self._allowed = AllowedHosts(allowed, "--kv-pool: source-allow")
        self._has_secret = has_secret

    async def permitted(self, host: str) -> str | None:
        """What to connect to; None: nothing. Where it depends on the host's address, that: what was
        looked at is what is connected to, whatever a name server says next.

        Raises:
            OSError, ValueError: the host has no address.
        """
        if self._allowed.names(host) or (self._has_secret and not self._allowed):
            return host
        for address in await addresses_of(host):
            plain = plain_address(address)
            is_here = plain is not None and plain.is_loopback
            if self._allowed.permits(host, address) if self._allowed else is_here:
                return address
        return None


@dataclass(slots=True, eq=False)
class _Hinted:
    """A store that was named.

    Args:
        number: its name for sources of chunks; never given to another one.
        used_at: when it was named or read last.
        client: to it, once it is known to be allowed.
        is_refused: it is not.
        was_in_vain: somebody has waited for it: nobody else does until it is connected to.
    """

    number: int
    used_at: float
    client: StoreClient | None = None
    is_refused: bool = False
    was_in_vain: bool = False

    @property
    def arena(self) -> ArenaInfo | None:
        """Where its memory is; None: it is not connected to."""
        return None if self.client is None else self.client.arena


class HintedStores:
    """Used by the pool client's loop thread alone, ``close`` excepted.

    Args:
        own: the stores of the configuration, whose numbers come first.
        connect: to a store of this deployment.
        rule: which ones may be connected to.
        count: told what became of each hint.
        on_left: told the number of a store that is not used any more.
    """

    def __init__(
        self,
        own: Sequence[ChunkStore],
        connect: Connect,
        rule: HintRule,
        count: Callable[[str], None],
        on_left: Callable[[int], None],
    ) -> None:
        self._own = own
        self._connect = connect
        self._rule = rule
        self._count = count
        self._on_left = on_left
        self._next = len(own)
        self._by_address: dict[tuple[str, int], _Hinted] = {}
        self._opening: set[asyncio.Task[None]] = set()

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
        clients = [h.client for h in self._by_address.values() if h.client is not None]
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
        await self._await_arena(hinted, deadline)
        client, arena = hinted.client, hinted.arena
        hinted.was_in_vain = arena is None
        if client is None or arena is None:
            self._count("not_allowed" if hinted.is_refused else "unreachable")
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
            arena = hinted.arena
            if arena is not None and arena.epoch == hint.epoch:
                hinted.used_at = now
                return hinted
        if address not in self._by_address:
            if len(self._by_address) >= MAX_HINTED_STORES:
                self._sweep(now)
            if len(self._by_address) >= MAX_HINTED_STORES:
                return None
            self._begin(address, now)
        hinted = self._by_address[address]
        if hinted.arena is not None:
            hinted.used_at = now
        return hinted

    def _begin(self, address: tuple[str, int], now: float) -> None:
        """Connect, if it is allowed."""
        self._by_address[address] = hinted = _Hinted(self._next, now)
        self._next += 1
        opening = asyncio.ensure_future(self._open(hinted, address))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, hinted: _Hinted, address: tuple[str, int]) -> None:
        host, port = address
        try:
            permitted = await self._rule.permitted(host)
        except (OSError, ValueError) as exc:
            logger.debug("a store that a request names has no address: %r: %s", host, exc)
            return
        if permitted is None:
            hinted.is_refused = True
            logger.info(
                "a request names a store at %s port %d, which is not allowed: --kv-pool "
                "source-allow=%s allows it",
                *(host, port, host),
            )
        elif self._by_address.get(address) is hinted:  # nobody has left it meanwhile
            hinted.client = self._connect(permitted, port)

    async def _await_arena(self, hinted: _Hinted, deadline: float) -> None:
        """Wait until a store is connected to, which another thread does, or refused; not where
        somebody has waited in vain."""
        while hinted.arena is None and not (hinted.is_refused or hinted.was_in_vain):
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(CONNECT_POLL_S)

    def _sweep(self, now: float) -> None:
        for address, hinted in list(self._by_address.items()):
            limit_s = IDLE_S if hinted.arena is not None else LOST_S
            if now - hinted.used_at <= limit_s:
                continue
            self._on_left(hinted.number)
            del self._by_address[address]
            if hinted.client is not None:
                asyncio.get_running_loop().run_in_executor(None, hinted.client.close)
