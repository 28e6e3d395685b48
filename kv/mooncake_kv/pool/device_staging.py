"""Moves a device's KV to and from a store through pinned host memory. Used by ``PoolWorker``.

Transports reach the stores' host memory, but not always a device's memory. So the backend's host
copies gather outgoing KV into pinned memory and scatter incoming KV from it. Two slots alternate
(double buffering): one part is copied while the next is in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import Empty, Queue

from mooncake_hal.errors import (
    BackendUnavailable,
    DeviceError,
    OutOfMemory,
    TransferCancelled,
)
from mooncake_hal.host_copies import HostCopier, HostCopies
from mooncake_hal.transport import MemoryRegion, Peer, Spans, Transfer, TransferState
from mooncake_hal.transports.spans import split_spans
from mooncake_hal.transports.staging import packed_addresses
from mooncake_kv.connector_worker import RankContext, RankTransports
from mooncake_kv.errors import KVConfigError

logger = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20
SLOTS = 2
_ALIGNMENT = 4096
"""Bytes by which a part of ``split_spans`` may exceed an even share."""

HOST_TRANSPORTS = ("shm", "rdma", "tcp")
"""The transports that reach host memory, best first."""

_DEVICE_TRANSPORTS = ("staged", "cuda_ipc", "hccs")


def host_transports(names: Sequence[str]) -> tuple[str, ...]:
    """The transports of ``names`` that reach a store; the others carry device memory only."""
    return tuple(name for name in names if name not in _DEVICE_TRANSPORTS)


def connect_memory(context: RankContext, max_moves: int) -> RankTransports | DeviceMemory:
    """Open a rank's transports to stores: directly from its KV memory, or through pinned host
    memory for ``max_moves`` concurrent moves.

    Raises:
        KVConfigError: neither is possible.
    """
    device = context.memory.regions[0].device
    try:
        if device != "cpu":
            return DeviceMemory(context, context.registry.host_copies(device), max_moves)
    except (DeviceError, OutOfMemory) as exc:
        raise KVConfigError(f"--kv-pool: KV on {device} can't be moved: {exc}") from exc
    except BackendUnavailable as exc:
        logger.warning(
            "--kv-pool: no pinned staging memory, so transports must reach the memory of %s "
            "directly: %s",
            device,
            exc,
        )
        return RankTransports(context.config, context.memory, context.registry, context.shared)
    config = replace(context.config, transports=host_transports(context.config.transports))
    return RankTransports(config, context.memory, context.registry, context.shared)


class DeviceMemory:
    """The pinned memory of one rank, and its connections to stores.

    Args:
        context: the rank's context.
        copies: host copies of its device.
        max_moves: moves that have memory at the same time; others wait.

    Raises:
        OutOfMemory, DeviceError: no pinned memory can be allocated.
        KVConfigError: no transport can register it.
    """

    def __init__(self, context: RankContext, copies: HostCopies, max_moves: int) -> None:
        self._copies = copies
        with ExitStack() as undo:
            pinned = copies.allocate_pinned(max_moves * SLOTS * SLOT_BYTES)
            undo.callback(pinned.close)
            memory = replace(
                context.memory,
                regions=(MemoryRegion(pinned.address, pinned.nbytes),),
                transports=HOST_TRANSPORTS,
            )
            config = replace(context.config, transports=host_transports(context.config.transports))
            self._transports = RankTransports(config, memory, context.registry, context.shared)
            self._undo = undo.pop_all()
        self._free: Queue[int] = Queue()
        for number in range(max_moves):
            self._free.put(pinned.address + number * SLOTS * SLOT_BYTES)

    @property
    def stops_writes_on_failure(self) -> bool:
        """Whether with each transport to stores a write ends with its writer; see ``Transport``."""
        return self._transports.stops_writes_on_failure

    def peer(
        self,
        engine_id: str,
        rank: int,
        addresses: dict[str, bytes],
        *,
        connection: int,
        timeout_s: float,
    ) -> StagedStore:
        """Connect to a store; see ``RankTransports.peer``."""
        inner = self._transports.peer(
            engine_id, rank, addresses, connection=connection, timeout_s=timeout_s
        )
        return StagedStore(inner, self._copies.copier, self._free)

    def transport_of(self, engine_id: str, rank: int, connection: int) -> str | None:
        """Name of the transport of an established connection to a store; None if there is none."""
        return self._transports.transport_of(engine_id, rank, connection)

    def forget(self, engine_id: str, connection: int | None = None) -> None:
        """Drop the connections to a store, or one of them. Idempotent."""
        self._transports.forget(engine_id, connection)

    def close(self) -> None:
        """Close all connections and free the memory. No transfer may be in flight. Idempotent."""
        self._transports.close()
        self._undo.close()


class StagedStore:
    """A ``Peer`` for device memory. Its transfers run on the thread that waits for them.

    Args:
        inner: the peer that moves pinned memory.
        make_copier: creates a copier for the current thread.
        free: addresses of free pinned memory, of SLOTS slots each.
    """

    def __init__(
        self, inner: Peer, make_copier: Callable[[], HostCopier], free: Queue[int]
    ) -> None:
        self._inner = inner
        self._make_copier = make_copier
        self._free = free

    def read(self, spans: Spans, *, timeout: float) -> StagedMove:
        return StagedMove(self._run_read, spans, time.monotonic() + timeout)

    def write(self, spans: Spans, *, timeout: float) -> StagedMove:
        return StagedMove(self._run_write, spans, time.monotonic() + timeout)

    def _run_read(self, move: StagedMove, parts: list[Spans]) -> None:
        with self._copying(move) as (base, copier):
            transfer = self._begin_read(move, parts[0], base)
            for number, part in enumerate(parts):
                transfer.wait()
                slot = _slot(base, number)
                if number + 1 < len(parts):
                    transfer = self._begin_read(move, parts[number + 1], _slot(base, number + 1))
                copier.scatter(slot, part.local, part.nbytes)
                copier.drain()

    @contextmanager
    def _copying(self, move: StagedMove) -> Iterator[tuple[int, HostCopier]]:
        """Acquire pinned memory and a copier for a move. The move's parts are drained before both
        are released.

        Raises:
            TransferCancelled: no pinned memory became free within the move's timeout.
        """
        with ExitStack() as undo:
            try:
                base = self._free.get(timeout=move.time_left())
            except Empty:
                raise TransferCancelled(
                    "other moves held all pinned memory until its deadline"
                ) from None
            undo.callback(self._free.put, base)
            copier = self._make_copier()
            undo.callback(copier.close)
            undo.callback(move.drain)
            yield base, copier

    def _begin_read(self, move: StagedMove, part: Spans, slot: int) -> Transfer:
        packed = Spans(packed_addresses(slot, part.nbytes), part.remote, part.nbytes)
        return move.track(self._inner.read(packed, timeout=move.time_left()))

    def _run_write(self, move: StagedMove, parts: list[Spans]) -> None:
        with self._copying(move) as (base, copier):
            transfer: Transfer | None = None
            for number, part in enumerate(parts):
                slot = _slot(base, number)
                copier.gather(part.local, part.nbytes, slot)
                copier.drain()
                if transfer is not None:
                    transfer.wait()
                packed = Spans(packed_addresses(slot, part.nbytes), part.remote, part.nbytes)
                transfer = move.track(self._inner.write(packed, timeout=move.time_left()))
            if transfer is not None:
                transfer.wait()


class StagedMove:
    """A ``Transfer`` that runs on the thread that calls ``wait``.

    Args:
        run: moves the parts.
        spans: all spans of the transfer.
        deadline: deadline in the time of ``time.monotonic``.
    """

    def __init__(
        self, run: Callable[[StagedMove, list[Spans]], None], spans: Spans, deadline: float
    ) -> None:
        self._run = run
        self._spans = spans
        self._deadline = deadline
        self._lock = threading.Lock()
        self._running: list[Transfer] = []
        self._state = TransferState.PENDING
        self._is_cancelled = False
        self._has_begun = False
        self._ended = threading.Event()

    def poll(self) -> TransferState:
        return self._state

    def wait(self, timeout: float | None = None) -> None:
        with self._lock:
            self._has_begun = True
            is_cancelled = self._is_cancelled
        try:
            if is_cancelled:
                raise TransferCancelled("the move was cancelled before it started")
            self._run(self, _parts(self._spans))
            self._state = TransferState.DONE
        finally:
            if self._state is TransferState.PENDING:
                self._state = TransferState.FAILED
            self._ended.set()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            running = list(self._running)
            has_begun = self._has_begun
        for transfer in running:
            transfer.cancel()
        if has_begun:
            self._ended.wait()

    def track(self, transfer: Transfer) -> Transfer:
        """Register the part that is in flight, so that ``cancel`` reaches it."""
        with self._lock:
            self._running = [transfer]
            is_cancelled = self._is_cancelled
        if is_cancelled:
            transfer.cancel()
        return transfer

    def drain(self) -> None:
        """Cancel the part in flight and wait for its end."""
        for transfer in self._running:
            transfer.cancel()

    def time_left(self) -> float:
        """Seconds until its deadline.

        Raises:
            TransferCancelled: the deadline has passed, or the move was cancelled. Not another
                TransferError, since neither is the fault of the connection.
        """
        left_s = self._deadline - time.monotonic()
        if self._is_cancelled:
            raise TransferCancelled("the move was cancelled")
        if left_s <= 0:
            raise TransferCancelled("its deadline passed before all of its parts were started")
        return left_s


def _slot(base: int, number: int) -> int:
    return base + number % SLOTS * SLOT_BYTES


def _parts(spans: Spans) -> list[Spans]:
    """Split spans into parts of at most SLOT_BYTES."""
    most = SLOT_BYTES - _ALIGNMENT
    return split_spans(spans, -(-spans.total_bytes // most))
