"""A third-party transport for tests: shared memory whose reads a gate holds, corrupts or fails.

Installed like any plugin, by an entry point; ``GATE`` belongs to the process that imports it. In a
process' environment, ``MOONCAKE_TEST_GATE=closed`` closes its gate from the start, and ``chaos``
injects random faults that any transport may have.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mooncake_hal.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec
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
from mooncake_hal.transports.shm.shm_plugin import load as load_shm
from mooncake_hal.transports.spans import split_spans

NAME = "gated"
ENTRY_POINTS = f"[mooncake_hal]\n{NAME} = support.pd_transport\n"
METADATA = "Metadata-Version: 2.1\nName: gated-transport\nVersion: 1\n"


def install(directory: Path) -> Path:
    """Write metadata that installs the plugin for processes with ``directory`` on their path."""
    info = directory / "gated_transport-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a read: delayed, lost, cut off after it has changed memory, or stuck."""

    delay_s: float = 0.0
    is_lost: bool = False
    is_cut: bool = False
    is_stuck: bool = False


class Gate:
    """Controls what happens to reads.

    ``num_held`` reads wait at a closed gate. With ``corrupts`` the data of reads is corrupted. The
    next ``num_failures`` reads fail, the next ``num_stuck`` never complete, and each takes at least
    ``delay_s``. With ``stops_writes_on_failure`` False a write has partly begun before it is held;
    the rest of a failed one can no longer be stopped, and arrives on ``land``. With
    ``ignores_cancellation`` held reads ignore deadlines and cancellation.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.chaos: random.Random | None = None
        self.num_chaotic = 0
        self.reset()
        mode = os.environ.get("MOONCAKE_TEST_GATE")
        if mode == "closed":
            self.close()
        self.chaos = random.Random() if mode == "chaos" else None

    def reset(self) -> None:
        """Let everything pass unchanged."""
        with self._changed:
            self.is_open = True
            self.corrupts = False
            self.num_failures = 0
            self.num_stuck = 0
            self.num_held = 0
            self.delay_s = 0.0
            self.stops_writes_on_failure = True
            self.ignores_cancellation = False
            self.num_landed = 0
            self._flying: list[tuple[int, bytes]] = []
            self._changed.notify_all()

    def open(self) -> None:
        """Release the held reads and let later ones pass."""
        with self._changed:
            self.is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hold all further reads."""
        with self._changed:
            self.is_open = False

    def draw_fault(self) -> Fault:
        """Choose the fault of one read."""
        if self.num_stuck:
            self.num_stuck -= 1
            return Fault(is_stuck=True)
        if self.chaos is None:
            return Fault(delay_s=self.delay_s)
        kind = self.chaos.random()
        self.num_chaotic += kind < 0.10
        return Fault(
            delay_s=self.chaos.uniform(0.0, 0.02),
            is_lost=kind < 0.04,
            is_cut=0.04 <= kind < 0.08,
            is_stuck=0.08 <= kind < 0.10,
        )

    def hold_write(self, rest: Spans) -> None:
        """Keep the rest of a failed write, which nobody can stop any more, until ``land``."""
        pieces = zip(rest.local.tolist(), rest.remote.tolist(), rest.nbytes.tolist(), strict=True)
        for local, remote, nbytes in pieces:
            self._flying.append((remote, ctypes.string_at(local, nbytes)))

    def land(self) -> None:
        """Deliver the rest of failed writes to the memory of this process."""
        flying, self._flying = self._flying, []
        for address, content in flying:
            ctypes.memmove(address, content, len(content))
            self.num_landed += 1

    def wake(self) -> None:
        """Wake held reads to check for cancellation."""
        with self._changed:
            self._changed.notify_all()

    def pass_through(self, fault: Fault, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        """Wait while the gate is closed, and for as long as the read's fault demands.

        Raises:
            TransferCancelled, TransferTimeout, PeerLost: as from a real transport.
        """
        opens_at = time.monotonic() + fault.delay_s
        with self._changed:
            self.num_held += 1
            try:
                while not self.is_open or fault.is_stuck or time.monotonic() < opens_at:
                    if is_cancelled() and not self.ignores_cancellation:
                        raise TransferCancelled("gated: cancelled")
                    if time.monotonic() > deadline and not self.ignores_cancellation:
                        raise TransferTimeout("gated: the gate stayed closed")
                    self._changed.wait(0.01)
            finally:
                self.num_held -= 1
            if self.num_failures or fault.is_lost:
                self.num_failures = max(0, self.num_failures - 1)
                raise PeerLost("gated: told to fail")


GATE = Gate()


class GatedTransfer:
    """A transfer that starts once somebody waits for it and the gate is open. ``brought`` is the
    local memory that a read changes, and that may be corrupted; ``flying`` the part of a write that
    arrives later if the write fails."""

    def __init__(
        self,
        begin: Callable[[], Transfer],
        brought: Spans | None,
        timeout: float,
        flying: Spans | None = None,
    ) -> None:
        self._begin = begin
        self._brought = brought
        self._flying = flying
        self._deadline = time.monotonic() + timeout
        self._is_cancelled = False
        self._ended = threading.Event()
        self._is_begun = False
        self._state = TransferState.PENDING

    def poll(self) -> TransferState:
        return self._state

    def wait(self, timeout: float | None = None) -> None:
        self._is_begun = True
        fault = GATE.draw_fault()
        try:
            self._pass(fault)
            self._begin().wait()
            if self._brought is not None and (GATE.corrupts or fault.is_cut):
                corrupt(self._brought)
            if fault.is_cut:
                raise PeerLost("gated: cut off")
            self._state = TransferState.DONE
        finally:
            if self._state is TransferState.PENDING:
                self._state = TransferState.FAILED
            self._ended.set()

    def _pass(self, fault: Fault) -> None:
        try:
            GATE.pass_through(fault, self._deadline, lambda: self._is_cancelled)
        except TransferError:
            if self._flying is not None:
                GATE.hold_write(self._flying)
            raise

    def cancel(self) -> None:
        self._is_cancelled = True
        GATE.wake()
        if self._is_begun:
            self._ended.wait()


def corrupt(spans: Spans) -> None:
    """Flip the sign bit of one float per 64 bytes: an error that no rounding could explain."""
    for address, nbytes in zip(spans.local.tolist(), spans.nbytes.tolist(), strict=True):
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        for index in range(3, nbytes, 64):
            memory[index] ^= 0x80


class GatedPeer:
    """A connection whose reads pass the gate."""

    def __init__(self, inner: Peer) -> None:
        self._inner = inner

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        return GatedTransfer(lambda: self._inner.read(spans, timeout=timeout), spans, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        if GATE.stops_writes_on_failure:
            return GatedTransfer(lambda: self._inner.write(spans, timeout=timeout), None, timeout)
        *sent, rest = split_spans(spans, 2)  # what is too short to be cut is the rest
        for part in sent:
            self._inner.write(part, timeout=timeout).wait()
        return GatedTransfer(lambda: self._inner.write(rest, timeout=timeout), None, timeout, rest)

    def close(self) -> None:
        self._inner.close()


class GatedEndpoint:
    """An endpoint of the gated transport."""

    transport = NAME

    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner

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

    def connect(self, address: bytes, *, timeout: float) -> Peer:
        return GatedPeer(self._inner.connect(address, timeout=timeout))

    def close(self) -> None:
        self._inner.close()


class GatedTransport:
    """Shared memory behind ``GATE``."""

    name = NAME

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def can_revoke(self) -> bool:
        return GATE.stops_writes_on_failure and self._inner.can_revoke

    @property
    def stops_writes_on_failure(self) -> bool:
        return GATE.stops_writes_on_failure and self._inner.stops_writes_on_failure

    def open(self, options: EndpointOptions) -> Endpoint:
        return GatedEndpoint(self._inner.open(options))

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return self._inner.reaches(local, remote)


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport; it is used only where it is requested."""
    return TransportSpec(
        NAME, API_VERSION, 1, lambda: Availability(True), lambda: GatedTransport(load_shm())
    )
