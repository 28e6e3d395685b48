"""Fault injection for any transport: simulates failures of the network or of a peer in tests.

``FaultyTransport`` wraps a transport and applies a fault of its ``Faults`` to each read and write.
The wrapped transport moves the bytes, so that a caller observes each fault as it would a real one:
late, missing, duplicate or reordered bytes, or an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_hal.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from mooncake_hal.session.regions import check_spans
from mooncake_hal.transport import (
    Endpoint,
    EndpointOptions,
    MemoryRegion,
    Peer,
    Spans,
    Transfer,
    TransferState,
    Transport,
)
from mooncake_hal.transports.spans import limit_spans, split_spans

SLICE_BYTES = 64 * 1024
"""Size in bytes of the slices of a throttled transfer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one transfer; the default is no fault.

    Args:
        fail: raise this from ``wait``; no bytes move.
        drop: never complete: the transfer fails at its deadline; no bytes move.
        delay_s: delay before the first byte, in seconds.
        bytes_per_s: maximum rate.
        truncate: move this fraction of the pieces, from 0 to 1, then fail with PeerLost.
        duplicate: move all bytes twice.
        reorder: seed of a random order in which the pieces are moved.
    """

    fail: TransferError | None = None
    drop: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    truncate: float | None = None
    duplicate: bool = False
    reorder: int | None = None


NO_FAULT = Fault()


@dataclass(slots=True)
class Faults:
    """The faults of future transfers; may be changed at any time, from any thread.

    Args:
        plan: faults of the next transfers, in order; each is used once.
        otherwise: fault of all later transfers.
        on_connect: error that the next ``connect`` raises once, or None.
    """

    plan: list[Fault] = field(default_factory=list)
    otherwise: Fault = NO_FAULT
    on_connect: TransferError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Fault:
        """Take the fault for a transfer that starts now."""
        with self._lock:
            return self.plan.pop(0) if self.plan else self.otherwise

    def take_connect(self) -> TransferError | None:
        """Take the error for a connection that is opened now, or None."""
        with self._lock:
            error, self.on_connect = self.on_connect, None
            return error


class FaultyTransport:
    """A transport with injected faults.

    Args:
        inner: the transport that moves the bytes.
        faults: the faults to inject.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def can_revoke(self) -> bool:
        return self._inner.can_revoke

    @property
    def stops_writes_on_failure(self) -> bool:
        return self._inner.stops_writes_on_failure

    def open(self, options: EndpointOptions) -> FaultyEndpoint:
        return FaultyEndpoint(self._inner.open(options), self._faults)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return self._inner.reaches(local, remote)


class FaultyEndpoint:
    """An endpoint whose peers inject faults."""

    def __init__(self, inner: Endpoint, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._peers: list[FaultyPeer] = []

    @property
    def transport(self) -> str:
        return self._inner.transport

    @property
    def address(self) -> bytes:
        return self._inner.address

    @property
    def variants(self) -> tuple[str, ...]:
        return self._inner.variants

    def register(self, region: MemoryRegion) -> int:
        return self._inner.register(region)

    def revoke(self, key: int) -> None:
        self._inner.revoke(key)

    def connect(self, address: bytes, *, timeout: float) -> FaultyPeer:
        if (error := self._faults.take_connect()) is not None:
            raise error
        peer = FaultyPeer(self._inner.connect(address, timeout=timeout), self._faults)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.end_transfers()
        self._inner.close()


class FaultyPeer:
    def __init__(self, inner: Peer, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._running: set[FaultyTransfer] = set()

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._move(self._inner.read, spans, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._move(self._inner.write, spans, timeout)

    def close(self) -> None:
        self.end_transfers()
        self._inner.close()

    def end_transfers(self) -> None:
        """Fail and drain all transfers in flight."""
        for transfer in list(self._running):
            transfer.abort(PeerLost("this side closed the connection"))

    def _move(self, move: Callable[..., Transfer], spans: Spans, timeout: float) -> Transfer:
        fault = self._faults.next()
        if fault == NO_FAULT:
            return move(spans, timeout=timeout)
        check_spans(spans)
        transfer = FaultyTransfer(move, spans, timeout, fault)
        self._running.add(transfer)
        transfer.start(self._running.discard)
        return transfer


class FaultyTransfer:
    """A transfer that a thread runs in steps, with a fault."""

    def __init__(
        self, move: Callable[..., Transfer], spans: Spans, timeout: float, fault: Fault
    ) -> None:
        self._move = move
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._fault = fault
        self._steps = _steps(spans, fault)
        self._error: TransferError | None = None
        self._aborted = threading.Event()
        self._ended = threading.Event()

    def start(self, ended: Callable[[FaultyTransfer], object]) -> None:
        """Start the transfer; ``ended`` is called when it is over."""

        def run() -> None:
            try:
                self._carry_out()
            except TransferError as exc:
                self._error = self._error or exc
            ended(self)
            self._ended.set()

        threading.Thread(target=run, name="mooncake-faults", daemon=True).start()

    def poll(self) -> TransferState:
        if not self._ended.is_set():
            return TransferState.PENDING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def wait(self, timeout: float | None = None) -> None:
        if not self._ended.wait(timeout):
            raise TransferTimeout(f"still running after {timeout} s of waiting")
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self.abort(TransferCancelled("cancelled by this side"))

    def abort(self, error: TransferError) -> None:
        """Fail the transfer with ``error``; returns once it is drained."""
        if not self._ended.is_set():
            self._error = self._error or error
            self._aborted.set()
            self._ended.wait()

    def _carry_out(self) -> None:
        fault = self._fault
        if fault.fail is not None:
            raise fault.fail
        self._pause(float("inf") if fault.drop else fault.delay_s)
        for step in self._steps:
            begun = time.monotonic()
            self._move(step, timeout=max(self._deadline - begun, 1e-6)).wait()
            if fault.bytes_per_s is not None:
                self._pause(step.total_bytes / fault.bytes_per_s - (time.monotonic() - begun))
            if self._aborted.is_set():
                raise TransferCancelled("ended by this side")
        if fault.truncate is not None:
            raise PeerLost(f"injected: broken off after {fault.truncate:.0%} of the pieces")

    def _pause(self, seconds: float) -> None:
        """Sleep, but at most until the deadline, or until the transfer is aborted."""
        left = self._deadline - time.monotonic()
        if self._aborted.wait(max(min(seconds, left), 0)):
            raise TransferCancelled("ended by this side")
        if seconds > left:
            raise TransferTimeout(f"not done within {self._timeout:g} s; drained")


def _steps(spans: Spans, fault: Fault) -> Sequence[Spans]:
    """Return the spans of each step, in order."""
    if not len(spans):
        return []
    if fault.reorder is not None:
        spans = _take(spans, np.random.default_rng(fault.reorder).permutation(len(spans)))
    if fault.truncate is not None:
        spans = _take(spans, np.arange(int(len(spans) * fault.truncate)))
    if not len(spans):
        return []
    steps = [spans]
    if fault.bytes_per_s is not None:
        steps = split_spans(spans, max(spans.total_bytes // SLICE_BYTES, 1))
    elif fault.reorder is not None:
        steps = limit_spans(spans, max(len(spans) // 4, 1))
    return steps * 2 if fault.duplicate else steps


def _take(spans: Spans, order: np.ndarray) -> Spans:
    return Spans(spans.local[order], spans.remote[order], spans.nbytes[order])
