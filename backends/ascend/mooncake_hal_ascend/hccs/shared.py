"""One vendor's engine for all the agents of an endpoint.

An NPU has few links and an engine few regions, so agents do not get an engine each: they share
one, and memory that several of them registered is registered once.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.adapter.agent import Slice
from mooncake_hal_ascend.hccs.settings import NAME
from mooncake_hal_ascend.hccs.vendor import VendorEngine

logger = logging.getLogger(__name__)

MAX_REGIONS = 256
"""HIXL takes no more per process; the arena is one of them."""

ALIGNMENT = 2 << 20
"""A page of the NPU: HCCS maps whole ones."""


class SharedEngine:
    """Starts an engine for the first agent, ends it with the last.

    Args:
        start: starts it.
        arena: the region that tokens and buffers lie in; registered while the engine runs.
        device: of the memory that it takes, such as ``"npu:0"``.
        bind_thread: makes the NPU current in the calling thread.
        needs_pages: whether regions must begin at a page of the NPU.
        ended: called when the last agent has left.
    """

    def __init__(
        self,
        start: Callable[[], VendorEngine],
        arena: MemoryRegion,
        device: str,
        bind_thread: Callable[[], None],
        *,
        needs_pages: bool,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._start = start
        self._arena = arena
        self._device = device
        self._bind_thread = bind_thread
        self._needs_pages = needs_pages
        self._ended = ended
        self._vendor: VendorEngine | None = None
        self._num_agents = 0
        self._counts: Counter[int] = Counter()  # by first address
        self._lock = threading.Lock()

    def join(self) -> VendorEngine:
        """Return the engine for one more agent.

        Raises:
            TransportUnavailable: it does not start.
        """
        with self._lock:
            self._bind_thread()
            if self._vendor is None:
                self._vendor = self._start()
                self._register_first(self._arena)  # a link that is up would not know it
                self._counts[self._arena.address] = 1
            self._num_agents += 1
            return self._vendor

    def leave(self) -> None:
        """Let an agent go, which has deregistered everything."""
        with self._lock:
            self._num_agents -= 1
            if self._num_agents == 0 and self._vendor is not None:
                self._withdraw(self._arena)
                self._vendor.close()
                self._vendor = None
                if self._ended is not None:
                    self._ended()

    def register(self, region: MemoryRegion) -> None:
        """Register memory, once more.

        Raises:
            TransportUnavailable: the engine can't take it; says why.
        """
        whole = self._whole(region)
        with self._lock:
            if not self._counts[whole.address]:
                self._require_takable(whole)
                self._register_first(whole)
            self._counts[whole.address] += 1

    def deregister(self, region: MemoryRegion) -> None:
        """Withdraw it once; the engine lets go of it when nobody holds it any more."""
        whole = self._whole(region)
        with self._lock:
            self._withdraw(whole)

    def move(self, session: str, part: Slice) -> None:
        """See ``Agent``; several threads at once."""
        vendor = self._running()
        self._bind_thread()
        if part.is_read:
            vendor.read(session, part.spans)
        else:
            vendor.write(session, part.spans)

    def _whole(self, region: MemoryRegion) -> MemoryRegion:
        start, end = self._arena.address, self._arena.address + self._arena.nbytes
        return self._arena if start <= region.address < end else region

    def _require_takable(self, region: MemoryRegion) -> None:
        if region.device != self._device:
            raise TransportUnavailable(
                NAME, f"this endpoint moves memory of {self._device}, not of {region.device}"
            )
        if self._needs_pages and region.address % ALIGNMENT:
            raise TransportUnavailable(
                NAME,
                f"a region begins at {region.address:#x}, HCCS needs a multiple of 2 MiB; allocate "
                "it with the backend's memory, or use protocol=roce",
            )
        if len(self._counts) >= MAX_REGIONS:
            raise TransportUnavailable(
                NAME, f"an engine takes {MAX_REGIONS} regions at most; register larger ones"
            )

    def _register_first(self, region: MemoryRegion) -> None:
        self._bind_thread()
        try:
            self._running().register(region.address, region.nbytes)
        except TransferError as exc:
            raise TransportUnavailable(
                NAME, f"the engine refuses {region.nbytes} bytes of {region.device}: {exc}"
            ) from exc

    def _withdraw(self, region: MemoryRegion) -> None:
        self._counts[region.address] -= 1
        if self._counts[region.address]:
            return
        del self._counts[region.address]
        self._bind_thread()
        try:
            self._running().unregister(region.address)
        except TransferError as exc:  # what is closed goes on closing
            logger.warning("%s: the engine keeps memory that was withdrawn: %s", NAME, exc)

    def _running(self) -> VendorEngine:
        if self._vendor is None:
            raise TransferError(f"{NAME}: the engine has been closed")
        return self._vendor
