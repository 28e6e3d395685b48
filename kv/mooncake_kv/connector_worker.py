"""Base class of a connector's per-rank worker: opens transports, executes the scheduler side's
messages, shuts down. ``PullWorker`` and ``PushWorker`` derive from it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from mooncake_hal.backend import Event
from mooncake_hal.errors import HalError, PeerLost
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.negotiation import AUTO, NegotiatedPeer, Transports
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


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The arguments of ``Transports.open`` that select transports."""

    wanted: str
    allowed: Sequence[str]


def choose_transports(config: KVTransferConfig, movers: Sequence[str]) -> TransportChoice:
    """Choose the transports that a rank opens: the configured ones, or all that can move its
    memory.

    Args:
        config: may name transports.
        movers: names of the transports that can move the memory, best first.
    """
    forced = config.transports
    return TransportChoice(wanted=forced[0] if len(forced) == 1 else AUTO, allowed=forced or movers)


ConvertRopeOrder = Callable[[Sequence[int], tuple[int, int], str], None]
"""Converts the rope rows of latents into the rank's own order. Takes a block table, the range of
tokens, and the order that they are in, as ``mooncake_hal.latents`` names it. Enqueues the
conversion on the calling thread's current device."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's KV memory. The engine owns it, and it outlives the worker.

    Args:
        geometry: geometry of the whole model's KV.
        shard: the part of the model's KV that this rank holds.
        layout: the address of each of its blocks.
        regions: the memory to register with transports; all on one device.
        transports: names of the transports that can move it, best first.
        convert_rope_order: converts rope rows; None unless the memory has latents of a known order.
    """

    geometry: KVGeometry
    shard: KVShard
    layout: KVLayout
    regions: Sequence[MemoryRegion]
    transports: Sequence[str]
    convert_rope_order: ConvertRopeOrder | None = None


class SharedTransports:
    """The transports that a rank has opened. Users that move the same memory with the same
    configuration, such as a connector and the KVCache pool, share one set. Any thread."""

    def __init__(self) -> None:
        self._opened: list[_SharedSet] = []
        self._lock = threading.Lock()

    def open(
        self, config: KVTransferConfig, memory: RankMemory, registry: Registry
    ) -> TransportsHandle:
        """Open transports and register the memory, or share a set that is already open.

        Raises:
            KVConfigError: a configured transport can't be used here, or none can.
        """
        with self._lock:
            for opened in self._opened:
                if opened.matches(config, memory):
                    opened.num_users += 1
                    return TransportsHandle(opened.transports, partial(self._release, opened))
            opened = _SharedSet(config, memory, _open_transports(config, memory, registry))
            self._opened.append(opened)
            return TransportsHandle(opened.transports, partial(self._release, opened))

    def _release(self, opened: _SharedSet) -> None:
        with self._lock:
            opened.num_users -= 1
            if opened.num_users:
                return
            self._opened.remove(opened)
        opened.transports.close()


@dataclass(slots=True, eq=False)
class _SharedSet:
    """A shared set of transports, what it was opened for, and how many users it has."""

    config: KVTransferConfig
    memory: RankMemory
    transports: Transports
    num_users: int = 1

    def matches(self, config: KVTransferConfig, memory: RankMemory) -> bool:
        """Whether this set moves the same memory with the same configuration."""
        own, other = self.memory, memory
        is_same = (own.regions, own.transports) == (other.regions, other.transports)
        return is_same and self.config == config


@dataclass(slots=True, eq=False)
class TransportsHandle:
    """One user's handle on a shared set of transports.

    Args:
        transports: the shared transports, valid until ``close``.
        release: gives up this user's share.
        has_ended: whether the handle was closed.
    """

    transports: Transports
    release: Callable[[], None]
    has_ended: bool = False

    def close(self) -> None:
        """Release the handle; the last one to be released closes the transports. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self.release()


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
        with ExitStack() as undo:
            choice = choose_transports(config, memory.transports)
            transports = Transports.open(
                registry, options, wanted=choice.wanted, allowed=choice.allowed
            )
            undo.callback(transports.close)
            for region in memory.regions:
                transports.register(region)
            undo.pop_all()
    except (HalError, ValueError, OSError) as exc:  # ValueError: a setting that can't be
        raise KVConfigError(f"KV can't be moved as configured: {exc}") from exc
    return transports


@dataclass(frozen=True, slots=True)
class RankContext:
    """The environment of a connector's worker.

    Args:
        rank: index of this rank in the instance.
        config: addresses, secret, timeouts.
        memory: the KV memory to move.
        registry: the installed transports.
        make_event: makes a new event on the rank's device. The worker records it after the step's
            kernels on the step's thread, and waits for it on a thread of its own.
        bind_thread: makes the rank's device current on the calling thread.
        emit: sends a message to the scheduler side. Any thread; never blocks for long.
        fail: reports the exception that killed a background thread, which ends the instance.
        shared: transports that the rank has opened for other users of its memory.
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
        """``bind_thread`` as the initializer of a thread pool. If an initializer raises, the pool
        drops its tasks without a report, so the failure is reported here."""
        try:
            self.bind_thread()
        except Exception as exc:
            self.fail(ConnectorDead(Fatal.RANK_THREAD_ENDED, exc))
            raise


LayerDone = Callable[[int], None]
"""Called with the model index of a layer that this rank holds, once the kernels that write the
step's KV of that layer are enqueued."""


class PushStep(msgspec.Struct, frozen=True, gc=False):
    """The part of one pushed request that a step computes. A Struct because it is constructed on
    the step's thread, where time matters.

    Args:
        request_id: the request.
        stop: end of the tokens that the step computes, exclusive.
        new_block_ids: blocks that its block table grows by before the step.
        restart: its whole block table, if it runs for the first time or restarts after preemption;
            its KV is then sent from the beginning.
    """

    request_id: str
    stop: int
    new_block_ids: tuple[int, ...] = ()
    restart: tuple[int, ...] | None = None


class RankTransports:
    """A rank's KV memory, registered with every transport that it may use, and the connections to
    peers. Any thread.

    Args:
        config: names the transports, and has the deployment's secret.
        memory: the memory that they move.
        registry: the installed transports.
        shared: transports that the rank has already opened.

    Raises:
        KVConfigError: a configured transport can't be used here, or none can.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        memory: RankMemory,
        registry: Registry,
        shared: SharedTransports,
    ) -> None:
        self._peers: dict[tuple[str, int, int], NegotiatedPeer] = {}
        self._connecting: dict[tuple[str, int, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._use = shared.open(config, memory, registry)
        self._transports = self._use.transports

    @property
    def addresses(self) -> dict[str, bytes]:
        """The addresses that peers connect to, by transport, best first."""
        return self._transports.addresses

    @property
    def constraints(self) -> dict[str, TransportConstraints]:
        """The constraints of each of these transports on both ends."""
        return self._transports.constraints

    @property
    def stops_writes_on_failure(self) -> bool:
        """Whether with each of these transports a write ends with its writer; see ``Transport``."""
        return self._transports.stops_writes_on_failure

    def peer(
        self,
        engine_id: str,
        rank: int,
        addresses: dict[str, bytes],
        *,
        connection: int = 0,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Peer:
        """Return the connection to a peer's rank. It is established on first use, by the best
        common transport.

        Args:
            engine_id, rank: the peer's epoch, and its rank.
            addresses: addresses of that rank, by transport.
            connection: number of the connection, if there are several: see ``PeerConnections``.
            timeout_s: timeout of connecting, in seconds; CONNECT_TIMEOUT_S at most.

        Raises:
            TransportUnavailable: no common transport reaches the rank; has the reason for each.
            TransferError: the connection failed.
        """
        key = engine_id, rank, connection
        with self._lock:
            connecting = self._connecting.setdefault(key, threading.Lock())
        with connecting:  # serializes callers that want the same connection only
            known = self._peers.get(key)
            if known is not None:
                return known.peer
            timeout = min(timeout_s, CONNECT_TIMEOUT_S)
            choice = self._transports.connect(addresses, timeout=timeout)
            with self._lock:
                is_wanted = self._connecting.get(key) is connecting
                if is_wanted:
                    self._peers[key] = choice
        if not is_wanted:  # `forget` or `close` came first, so nothing else would close it
            choice.peer.close()
            raise PeerLost(f"instance {engine_id} was dropped while it was being connected to")
        logger.info("%s rank %d: %s", engine_id, rank, choice.reason)
        return choice.peer

    def transport_of(self, engine_id: str, rank: int, connection: int = 0) -> str | None:
        """Name of the transport of an established connection; None if there is none."""
        known = self._peers.get((engine_id, rank, connection))
        return None if known is None else known.name

    def forget(self, engine_id: str, connection: int | None = None) -> None:
        """Close the connections to all ranks of a peer: all of them, or those of one number.
        Idempotent."""

        def matches(key: tuple[str, int, int]) -> bool:
            return key[0] == engine_id and connection in (None, key[2])

        with self._lock:
            peers = [self._peers.pop(key) for key in list(self._peers) if matches(key)]
            for key in list(self._connecting):
                if matches(key):
                    del self._connecting[key]
        for each in peers:
            each.peer.close()

    def close(self) -> None:
        """Close all connections and endpoints. Idempotent."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            self._connecting.clear()
        for each in peers:
            each.peer.close()
        self._use.close()


def single_thread(name: str, bind: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Make a pool of one thread that is started immediately, so that a later ``submit`` can't fail
    because the host has no thread left.

    Args:
        name: name of the thread.
        bind: the thread's initializer.

    Raises:
        KVConfigError: the thread can't be started.
    """
    threads = ThreadPoolExecutor(1, name, initializer=bind)
    try:
        threads.submit(int).result()
    except RuntimeError as exc:
        raise KVConfigError(
            f"the thread {name}, which moves KV, can't be started: {exc}; raise the limit of "
            "threads or processes (ulimit -u, pids)"
        ) from exc
    return threads


class ConnectorWorker(ABC):
    """One rank's half of a connector. Subclasses move the bytes.

    Args:
        context: the rank's memory, and its link to the scheduler side.

    Raises:
        KVConfigError: the configuration can't be applied here.
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
    def _execute(self, message: bytes) -> None:
        """Execute a message from the scheduler side. Called with the lock held."""

    @abstractmethod
    def _drain(self) -> None:
        """Stop the transfers in flight and wait until they are drained. No further message is
        executed."""

    def receive(self, message: bytes) -> None:
        """Process a message from the scheduler side; long work runs on the worker's own threads.
        Messages that arrive after ``close`` are dropped."""
        with self._lock:
            if not self._is_closed:
                self._execute(message)

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        """Prepare for a step that runs these requests' tokens. The step's thread; returns
        immediately.

        Returns:
            A callback for the step's thread to call with each layer whose KV writes are enqueued on
            the device; None if no request needs it. Layers that it is not called for are sent after
            ``end_step``, so a captured graph, which makes no callbacks, is correct too.
        """
        return None

    def end_step(self) -> None:  # noqa: B027  # a worker that reads has nothing to do here
        """All kernels of the step are enqueued. Called before the next ``begin_step`` at the
        latest, on the step's thread."""

    def convert_rope_order(
        self, block_ids: Sequence[int], tokens: tuple[int, int], order: str
    ) -> None:
        """Convert the part of a prompt that came from a peer into this rank's order of rotated
        elements, before it is reported as loaded. Blocks until the device is done. Runs on a thread
        that is bound to the device."""
        convert = self.context.memory.convert_rope_order
        assert convert is not None, "the handshake refuses what this rank can't convert"
        convert(block_ids, tokens, order)
        event = self.context.make_event()
        event.record()
        event.synchronize()

    def close(self) -> None:
        """Stop all threads and revoke the peers' access to the memory. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._drain()
        self._transports.close()

    def _announce(self) -> None:
        """Send this rank's metadata and addresses to the scheduler side, which may send messages
        from now on."""
        memory, transports = self.context.memory, self._transports
        metadata = RankMetadata(memory.shard, memory.layout, transports.addresses)
        ready = RankReady(metadata, transports.stops_writes_on_failure, transports.constraints)
        self.context.emit(encode(ready))
