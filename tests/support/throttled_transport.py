"""A third-party transport for tests: shared memory over a link of a given speed.

All transfers of a process share the link, one after another, as on a wire; ``LINK`` belongs to the
process that imports it. Installed like any plugin, by an entry point.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from support.pd_transport import GatedEndpoint, GatedTransport

from mooncake_hal.errors import TransferTimeout
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec
from mooncake_hal.transport import (
    Endpoint,
    EndpointOptions,
    Peer,
    Spans,
    Transfer,
    TransferState,
)
from mooncake_hal.transports.shm.shm_plugin import load as load_shm

NAME = "throttled"
ENTRY_POINTS = f"[mooncake_hal]\n{NAME} = support.throttled_transport\n"
METADATA = "Metadata-Version: 2.1\nName: throttled-transport\nVersion: 1\n"


def install(directory: Path) -> Path:
    """Write metadata that installs the plugin for processes with ``directory`` on their path."""
    info = directory / "throttled_transport-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory


class Link:
    """A wire: ``bytes_per_s`` in all, first come, first served."""

    def __init__(self) -> None:
        self.bytes_per_s = float("inf")
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """The time on the monotonic clock at which a transfer that is requested now completes."""
        with self._lock:
            begins_at = max(self._free_at, time.monotonic())
            self._free_at = begins_at + nbytes / self.bytes_per_s
            return self._free_at


LINK = Link()


class ThrottledTransfer:
    """A transfer that is complete once the link has carried it."""

    def __init__(self, inner: Transfer, done_at: float) -> None:
        self._inner = inner
        self._done_at = done_at

    def poll(self) -> TransferState:
        if time.monotonic() < self._done_at:
            return TransferState.PENDING
        return self._inner.poll()

    def wait(self, timeout: float | None = None) -> None:
        left = self._done_at - time.monotonic()
        if timeout is not None and left > timeout:
            time.sleep(timeout)
            raise TransferTimeout("throttled: still in flight")
        time.sleep(max(0.0, left))
        self._inner.wait(timeout)

    def cancel(self) -> None:
        self._inner.cancel()


class ThrottledPeer:
    """A connection over the link."""

    def __init__(self, inner: Peer) -> None:
        self._inner = inner

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        transfer = self._inner.read(spans, timeout=timeout)
        return ThrottledTransfer(transfer, LINK.reserve(spans.total_bytes))

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        transfer = self._inner.write(spans, timeout=timeout)
        return ThrottledTransfer(transfer, LINK.reserve(spans.total_bytes))

    def close(self) -> None:
        self._inner.close()


class ThrottledEndpoint(GatedEndpoint):
    """An endpoint of the throttled transport."""

    transport = NAME

    def connect(self, address: bytes, *, timeout: float) -> Peer:
        return ThrottledPeer(self._inner.connect(address, timeout=timeout))


class ThrottledTransport(GatedTransport):
    """Shared memory over ``LINK``."""

    name = NAME

    def open(self, options: EndpointOptions) -> Endpoint:
        return ThrottledEndpoint(self._inner.open(options))


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport; it is used only where it is requested."""
    return TransportSpec(
        NAME, API_VERSION, 1, lambda: Availability(True), lambda: ThrottledTransport(load_shm())
    )
