"""Hinted stores: stores that requests name, in addition to the configured ones, because a proxy
believes that they have the prompt's KV. Used by ``PoolClient``.

A hint is tried once, within the request's timeout. Every problem with it is a miss: the store is
gone, was restarted, has fewer chunks than expected, or replies too late. Only stores that prove
knowledge of the deployment's secret are probed. Without a secret that proves nothing, so that only
stores of this host, or of hosts that the operator has allowed, are used.
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
"""Upper bound of connected hinted stores; each costs a session and a thread."""
IDLE_S = 120.0
"""Seconds after which a store that no request has named is disconnected."""
UNREACHABLE_S = 10.0
"""The same for a store that is not connected."""
SWEEP_S = 5.0
"""Seconds between two checks for idle stores."""
CONNECT_POLL_S = 0.002

Connect = Callable[[str, int], StoreClient]


class HintRule:
    """The rule that decides which stores a request may name.

    Args:
        allowed: see ``AllowedHosts``. Empty: every host if ``has_secret``, else only this host.
        has_secret: whether stores must prove knowledge of the deployment's secret.

    Raises:
        KVConfigError: an entry of ``allowed`` is not a host, address or network.
    """

    def __init__(self, allowed: Sequence[str], *, has_secret: bool) -> None:
        self._allowed = AllowedHosts(allowed, "--kv-pool: source-allow")
        self._has_secret = has_secret

    async def permitted(self, host: str) -> str | None:
        """The host or address to connect to; None if the host is not allowed. If the rule depends
        on the host's address, this is the address that was checked, so that a second name
        resolution can't bypass the check.

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
    """A store that a request has named.

    Args:
        number: its number in ``ChunkSource``; never reused for another store.
        used_at: when it was last named or read.
        client: its client, once the rule has allowed it.
        is_refused: the rule does not allow it.
        has_timed_out: a request has waited for its connection until its timeout; others don't wait
            before it is connected.
    """

    number: int
    used_at: float
    client: StoreClient | None = None
    is_refused: bool = False
    has_timed_out: bool = False

    @property
    def arena(self) -> ArenaInfo | None:
        """The store's arena; None while it is not connected."""
        return None if self.client is None else self.client.arena


class HintedStores:
    """The stores that requests have named. Used on the pool client's loop thread only, except for
    ``close``.

    Args:
        own: the configured stores, whose numbers come first.
        connect: creates a client of a store of this deployment.
        rule: decides which stores are allowed.
        count: called with the outcome of each hint.
        on_disconnect: called with the number of a store that was disconnected.
    """

    def __init__(
        self,
        own: Sequence[ChunkStore],
        connect: Connect,
        rule: HintRule,
        count: Callable[[str], None],
        on_disconnect: Callable[[int], None],
    ) -> None:
        self._own = own
        self._connect = connect
        self._rule = rule
        self._count = count
        self._on_disconnect = on_disconnect
        self._next = len(own)
        self._by_address: dict[tuple[str, int], _Hinted] = {}
        self._opening: set[asyncio.Task[None]] = set()

    def use(self, number: int) -> ChunkStore | None:
        """The store with this number, which is about to be read; None if it was disconnected."""
        for hinted in self._by_address.values():
            if hinted.number == number:
                hinted.used_at = time.monotonic()
                return hinted.client
        return None

    async def probe(
        self, hints: Sequence[PrefixSource], keys: Sequence[bytes], timeout_s: float
    ) -> list[tuple[int, list[Residence]]]:
        """Probe the named stores; returns the results of those that reply within ``timeout_s``
        seconds, with their numbers."""
        deadline = time.monotonic() + timeout_s
        answers = await asyncio.gather(*(self._probe(hint, keys, deadline) for hint in hints))
        return list({found[0]: found for found in answers if found is not None}.values())

    async def disconnect_idle(self) -> None:
        """Disconnect idle stores periodically, for as long as the loop runs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep(time.monotonic())

    def close(self) -> None:
        """Disconnect all stores, once the loop has ended. Idempotent."""
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
            self._count("own")  # every look-up probes the configured stores anyway
            return None
        hinted = self._find(hint)
        if hinted is None:
            self._count("too_many")
            return None
        await self._await_arena(hinted, deadline)
        client, arena = hinted.client, hinted.arena
        hinted.has_timed_out = arena is None
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
        """The store of a hint, connected or connecting; None if MAX_HINTED_STORES are in use."""
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
        """Start to connect, if the rule allows it."""
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
            logger.debug("a request names a store whose address is not known: %r: %s", host, exc)
            return
        if permitted is None:
            hinted.is_refused = True
            logger.info(
                "a request names a store at %s port %d, which is not allowed; to allow it: "
                "--kv-pool source-allow=%s",
                host,
                port,
                host,
            )
        elif self._by_address.get(address) is hinted:  # not swept in the meantime
            hinted.client = self._connect(permitted, port)

    async def _await_arena(self, hinted: _Hinted, deadline: float) -> None:
        """Wait until a store is connected (by its client's thread) or refused. Returns at once if
        an earlier request has waited in vain."""
        while hinted.arena is None and not (hinted.is_refused or hinted.has_timed_out):
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(CONNECT_POLL_S)

    def _sweep(self, now: float) -> None:
        for address, hinted in list(self._by_address.items()):
            limit_s = IDLE_S if hinted.arena is not None else UNREACHABLE_S
            if now - hinted.used_at <= limit_s:
                continue
            self._on_disconnect(hinted.number)
            del self._by_address[address]
            if hinted.client is not None:
                asyncio.get_running_loop().run_in_executor(None, hinted.client.close)
