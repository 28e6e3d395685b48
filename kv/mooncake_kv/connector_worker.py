"""Base class of a connector's per-rank side: opens transports, takes orders, ends."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypedDict

import msgspec

from mooncake_hal.backend import Event
from mooncake_hal.errors import HalError, PeerLost
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.negotiation import AUTO, Transports
from mooncake_hal.registry import Registry
from mooncake_hal.specs import TransportConstraints
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Peer
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import ConnectorDead, Fatal, KVConfigError
from mooncake_kv.handshake import RankMetadata
from mooncake_kv.io_loop import raise_descriptor_limit
from mooncake_kv.ranks import RankReady, encode

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Wanted(TypedDict):
    """The arguments of ``Transports.open`` that choose transports."""

    wanted: str
    allowed: Sequence[str]


def transports_wanted(config: KVTransferConfig, movers: Sequence[str]) -> Wanted:
    """Which transports a rank opens: those that were asked for, or all that move its memory.

    Args:
        config: may name some.
        movers: those that can move the memory, best first.
    """
    forced = config.transports
    return Wanted(wanted=forced[0] if len(forced) == 1 else AUTO, allowed=forced or movers)


TurnRope = Callable[[Sequence[int], tuple[int, int], str], None]
"""Brings rope rows of latents into a rank's own order: takes a block table, the range of tokens,
and the order that they are in, as ``mooncake_hal.latents`` names it. Enqueues that on the device
of the calling thread."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's KV memory, which somebody else owns, and which outlives the worker.

    Args:
        geometry: of the whole model's KV.
        shard: the part of it that this rank holds.
        layout: where each of its blocks lies.
        regions: the memory, to be registered with transports; on one device.
        transports: names of those that can move it, best first.
        turn_rope: where it holds latents of a known order.
    """

    geometry: KVGeometry
    shard: KVShard
    layout: KVLayout
    regions: Sequence[MemoryRegion]
    transports: Sequence[str]
    turn_rope: TurnRope | None = None


class SharedTransports:
    """What a rank has opened: who wants the same memory moved in the same way shares one set of
    transports, such as a connector and the KVCache pool. Any thread."""

    def __init__(self) -> None:
        self._opened: list[_Opened] = []
        self._lock = threading.Lock()

    def open(
        self, config: KVTransferConfig, memory: RankMemory, registry: Registry
    ) -> TransportsUse:
        """Open and register, or join who did.

        Raises:
            KVConfigError: a transport that was asked for can't be used here, or none can.
        """
        with self._lock:
            for opened in self._opened:
                if opened.moves(config, memory):
                    opened.num_users += 1
                    return TransportsUse(opened.transports, partial(self._leave, opened))
            opened = _Opened(config, memory, _open_transports(config, memory, registry))
            self._opened.append(opened)
            return TransportsUse(opened.transports, partial(self._leave, opened))

    def _leave(self, opened: _Opened) -> None:
        with self._lock:
            opened.num_users -= 1
            if opened.num_users:
                return
            self._opened.remove(opened)
        opened.transports.close()


@dataclass(slots=True, eq=False)
class _Opened:
    """Transports, what for, and how many use them."""

    config: KVTransferConfig
    memory: RankMemory
    transports: Transports
    num_users: int = 1

    def moves(self, config: KVTransferConfig, memory: RankMemory) -> bool:
        """Whether it is the same memory, to be moved in the same way."""
        own, other = self.memory, memory
        is_same = (own.regions, own.transports) == (other.regions, other.transports)
        return is_same and self.config == config


@dataclass(slots=True, eq=False)
class TransportsUse:
    """One user's share in transports.

    Args:
        transports: to be used until ``close``.
        leave: the user ends.
    """

    transports: Transports
    leave: Callable[[], None]
    has_ended: bool = False

    def close(self) -> None:
        """The last user closes them. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self.leave()


def _open_transports(
    config: KVTransferConfig, memory: RankMemory, registry: Registry
) -> Transports:
    options = EndpointOptions(
        host=config.host,
        advertise_host=config.advertise_host or None,
        port_range=config.port_range,
        secret=config.secret.encode(),
        allow_no_secret=config.allow_no_secret,
        device=memory.regions[0].device,
    )
    try:
        transports = Transports.open(
            registry, options, **transports_wanted(config, memory.transports)
        )
        for region in memory.regions:
            transports.register(region)
    except (HalError, ValueError, OSError) as exc:  # ValueError: a setting that can't be
        raise KVConfigError(f"KV can't be moved as asked: {exc}") from exc
    return transports


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a connector's worker gets to work with.

    Args:
        rank: which rank of the instance this is.
        config: addresses, secret, deadlines.
        memory: what it moves.
        registry: of transports.
        make_event: a new event on the rank's device. The worker records it behind the step's
            kernels in the step's thread, and waits for it in a thread of its own.
        bind_thread: makes the rank's device current in the calling thread.
        emit: sends a message to the scheduler side. Any thread; never blocks for long.
        fail: a background thread died of this; the instance ends with it.
        shared: what the rank has opened for others that move its memory.
    """

    rank: int
    config: KVTransferConfig
    memory: RankMemory
    registry: Registry
    make_event: Callable[[], Event]
    bind_thread: Callable[[], None]
    emit: Callable[[bytes], None]
    fail: Callable[[BaseException], None]
    shared: SharedTransports = field(default_factory=SharedTransports)

    def bind_pool_thread(self) -> None:
        """The first thing that a pool's thread does. Where it fails the pool drops what it was
        given, and nobody reports that."""
        try:
            self.bind_thread()
        except Exception as exc:
            self.fail(ConnectorDead(Fatal.RANK_THREAD_ENDED, exc))
            raise


LayerDone = Callable[[int], None]
"""Takes a held layer's number in the model once the step's KV of that layer is enqueued."""


class PushStep(msgspec.Struct, frozen=True, gc=False):
    """What a step computes of one request whose KV is pushed. A Struct, because it is made in the
    step's thread.

    Args:
        request_id: which.
        stop: the step runs its tokens before this one.
        new_block_ids: what its block table grows by before the step.
        restart: its block table, if it runs for the first time or starts over after preemption;
            all of it is sent again then.
    """

    request_id: str
    stop: int
    new_block_ids: tuple[int, ...] = ()
    restart: tuple[int, ...] | None = None


class RankTransports:
    """A rank's KV memory, registered with every transport it may use. Any thread.

    Args:
        config: names the transports wanted, and the deployment's secret.
        memory: what they move.
        registry: of transports.
        shared: what the rank has opened already.

    Raises:
        KVConfigError: a transport that was asked for can't be used here, or none can.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        memory: RankMemory,
        registry: Registry,
        shared: SharedTransports,
    ) -> None:
        self._peers: dict[tuple[str, int, int], Peer] = {}
        self._connecting: dict[tuple[str, int, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._use = shared.open(config, memory, registry)
        self._transports = self._use.transports

    @property
    def addresses(self) -> dict[str, bytes]:
        """What peers connect to, by transport, best first."""
        return self._transports.addresses

    @property
    def constraints(self) -> dict[str, TransportConstraints]:
        """What each of these transports asks of both ends."""
        return self._transports.constraints

    @property
    def ends_writes(self) -> bool:
        """Whether by each of these transports a write ends with its writer; see ``Transport``."""
        return self._transports.ends_writes

    def peer(
        self,
        engine_id: str,
        rank: int,
        addresses: dict[str, bytes],
        *,
        connection: int = 0,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Peer:
        """A connection to a peer's rank, made at first use by the best common transport, within
        CONNECT_TIMEOUT_S or less.

        Args:
            engine_id, rank: of the peer.
            addresses: of that rank, by transport.
            connection: which one, where there are several: see ``PeerConnections``.
            timeout_s: for what there is to connect.

        Raises:
            TransportUnavailable: no common transport reaches it; says why for each.
            TransferError: it can't be connected to.
        """
        key = engine_id, rank, connection
        with self._lock:
            connecting = self._connecting.setdefault(key, threading.Lock())
        with connecting:  # callers that want the same one wait, others don't
            known = self._peers.get(key)
            if known is not None:
                return known
            timeout = min(timeout_s, CONNECT_TIMEOUT_S)
            choice = self._transports.connect(addresses, timeout=timeout)
            with self._lock:
                is_wanted = self._connecting.get(key) is connecting
                if is_wanted:
                    self._peers[key] = choice.peer
        if not is_wanted:  # nobody would close it any more
            choice.peer.close()
            raise PeerLost(f"instance {engine_id} was given up while it was connected to")
        logger.info("%s rank %d: %s", engine_id, rank, choice.reason)
        return choice.peer

    def forget(self, engine_id: str, connection: int | None = None) -> None:
        """Drop all connections to all ranks of a peer, or that one to each. Idempotent."""

        def is_meant(key: tuple[str, int, int]) -> bool:
            return key[0] == engine_id and connection in (None, key[2])

        with self._lock:
            peers = [self._peers.pop(key) for key in list(self._peers) if is_meant(key)]
            for key in list(self._connecting):
                if is_meant(key):
                    del self._connecting[key]
        for peer in peers:
            peer.close()

    def close(self) -> None:
        """Close all connections and endpoints. Idempotent."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            self._connecting.clear()
        for peer in peers:
            peer.close()
        self._use.close()


def lone_thread(name: str, bind: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """A pool of one thread, which is there from now on: what it is given later can't fail because
    the host has no thread left.

    Args:
        name: of the thread.
        bind: what it does first.

    Raises:
        KVConfigError: it can't be started.
    """
    threads = ThreadPoolExecutor(1, name, initializer=bind)
    try:
        threads.submit(int).result()
    except RuntimeError as exc:
        raise KVConfigError(
            f"the thread {name}, which moves KV, can't be started: {exc}; is the limit of threads "
            "or processes (ulimit -u, pids) too low?"
        ) from exc
    return threads


class ConnectorWorker(ABC):
    """One rank's half of a connector. Its subclass moves the bytes.

    Args:
        context: the rank's memory, and its way to the scheduler side.

    Raises:
        KVConfigError: the configuration can't be followed here.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context
        raise_descriptor_limit()
        self._timeout_s = context.config.transfer_timeout_s
        self._transports = RankTransports(
            context.config, context.memory, context.registry, context.shared
        )
        self._lock = threading.Lock()
        self._is_closed = False

    @abstractmethod
    def _obey(self, message: bytes) -> None:
        """Act on a message of the scheduler side. The lock is held."""

    @abstractmethod
    def _drain(self) -> None:
        """End what moves, and wait for that; no message comes any more."""

    def receive(self, message: bytes) -> None:
        """Take a message of the scheduler side; long work goes to threads of the worker. What comes
        when it closes is dropped."""
        with self._lock:
            if not self._is_closed:
                self._obey(message)

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        """A step is about to run these requests' tokens. The step's thread; returns at once.

        Returns:
            To be called in the step's thread with each layer whose writes of KV are enqueued
            on the device; None if nothing waits for layers. What it is not called for is sent after
            ``end_step``, so that a captured graph, which calls nothing, is correct, too.
        """
        return None

    def end_step(self) -> None:  # noqa: B027  # a worker that reads has nothing to do here
        """The step's kernels are all enqueued; comes before the next ``begin_step`` at the latest.
        The step's thread."""

    def turn_rope(self, block_ids: Sequence[int], tokens: tuple[int, int], order: str) -> None:
        """Bring what a peer has left of a prompt into this rank's order of rotated elements, before
        anybody is told that it is there; returns when that is done. A thread that is bound."""
        turn = self.context.memory.turn_rope
        assert turn is not None, "the handshake refuses what this rank can't turn"
        turn(block_ids, tokens, order)
        event = self.context.make_event()
        event.record()
        event.synchronize()

    def close(self) -> None:
        """Stop all threads and withdraw the memory from peers. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._drain()
        self._transports.close()

    def _announce(self) -> None:
        """Tell the scheduler side what is here and how to reach it; orders may come from now on."""
        memory, transports = self.context.memory, self._transports
        metadata = RankMetadata(memory.shard, memory.layout, transports.addresses)
        ready = RankReady(metadata, transports.ends_writes, transports.constraints)
        self.context.emit(encode(ready))
