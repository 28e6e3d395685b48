"""A vendor engine that is shared by all agents of an endpoint, and the agents.

An NPU has few links and an engine few regions. Agents therefore share one engine, and memory that
several of them register is registered with it once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mooncake_hal.backend import Allocation
from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.session.authentication import encode
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.adapters.adapter_messages import decode_message
from mooncake_hal.transports.adapters.engine_agent import Slice
from mooncake_hal_ascend.hccs.hccs_settings import NAME
from mooncake_hal_ascend.hccs.hccs_staging import HccsRegionInfo
from mooncake_hal_ascend.hccs.vendor_engines import VendorEngine

if TYPE_CHECKING:
    from mooncake_hal_ascend.hccs.hccs_staging import StagedReader, StagedWriter, StagingBufferPool

logger = logging.getLogger(__name__)

MAX_REGIONS = 256
"""HIXL's limit per process. The workspaces' memory counts as one region."""

ALIGNMENT = 2 << 20
"""Size of an NPU page, in bytes: HCCS maps whole pages."""

WORKSPACE_BYTES = 2 << 20
SLOT_BYTES = 512
"""Size of a slot: the NPU's allocation granularity, which exceeds the size of a token."""


class SharedEngine:
    """A reference-counted engine: started for the first agent, closed with the last.

    Args:
        start: starts the engine.
        workspaces: region with the tokens and buffers; registered while the engine runs.
        device: device whose memory can be registered, such as ``"npu:0"``.
        bind_thread: makes the NPU current in the calling thread.
        needs_pages: whether regions must be aligned to an NPU page.
        on_closed: called when the last agent has left.
    """

    def __init__(
        self,
        start: Callable[[], VendorEngine],
        workspaces: MemoryRegion,
        device: str,
        bind_thread: Callable[[], None],
        *,
        needs_pages: bool,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        self._start = start
        self._workspaces = workspaces
        self._device = device
        self._bind_thread = bind_thread
        self._needs_pages = needs_pages
        self._on_closed = on_closed
        self._vendor: VendorEngine | None = None
        self._num_agents = 0
        self._counts: Counter[int] = Counter()  # by first address
        self._lock = threading.Lock()

    def join(self) -> VendorEngine:
        """Add an agent, and return the engine.

        Raises:
            TransportUnavailable: the engine does not start.
        """
        with self._lock:
            self._bind_thread()
            if self._vendor is None:
                self._vendor = self._start()
                self._register_with_engine(self._workspaces)  # must precede the engine's first link
                self._counts[self._workspaces.address] = 1
            self._num_agents += 1
            return self._vendor

    def leave(self) -> None:
        """Remove an agent, which must have deregistered all of its regions."""
        with self._lock:
            self._num_agents -= 1
            if self._num_agents == 0 and self._vendor is not None:
                self._remove_registration(self._workspaces)
                self._vendor.close()
                self._vendor = None
                if self._on_closed is not None:
                    self._on_closed()

    def register(self, region: MemoryRegion) -> None:
        """Add a registration of a region; the first one registers it with the engine.

        Raises:
            TransportUnavailable: the engine can't register the region; the message says why.
        """
        whole = self._registered_region(region)
        with self._lock:
            if not self._counts[whole.address]:
                self._require_registrable(whole)
                self._register_with_engine(whole)
            self._counts[whole.address] += 1

    def deregister(self, region: MemoryRegion) -> None:
        """Remove a registration of a region; removing the last one unregisters it from the
        engine."""
        whole = self._registered_region(region)
        with self._lock:
            self._remove_registration(whole)

    def move(self, session: str, part: Slice) -> None:
        """Move a slice and wait for it. Several threads may call this concurrently."""
        vendor = self._running()
        self._bind_thread()
        if part.is_read:
            vendor.read(session, part.spans)
        else:
            vendor.write(session, part.spans)

    def _registered_region(self, region: MemoryRegion) -> MemoryRegion:
        start, end = self._workspaces.address, self._workspaces.address + self._workspaces.nbytes
        return self._workspaces if start <= region.address < end else region

    def _require_registrable(self, region: MemoryRegion) -> None:
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

    def _register_with_engine(self, region: MemoryRegion) -> None:
        self._bind_thread()
        try:
            self._running().register(region.address, region.nbytes)
        except TransferError as exc:
            raise TransportUnavailable(
                NAME, f"the engine refuses {region.nbytes} bytes of {region.device}: {exc}"
            ) from exc

    def _remove_registration(self, region: MemoryRegion) -> None:
        self._counts[region.address] -= 1
        if self._counts[region.address]:
            return
        del self._counts[region.address]
        self._bind_thread()
        try:
            self._running().unregister(region.address)
        except TransferError as exc:  # closing continues
            logger.warning("%s: the engine did not unregister memory: %s", NAME, exc)

    def _running(self) -> VendorEngine:
        if self._vendor is None:
            raise TransferError(f"{NAME}: the engine has been closed")
        return self._vendor


@dataclass(frozen=True, slots=True)
class AgentStaging:
    """Moves many small pieces as contiguous runs; where a member is None, pieces move one by one.

    Args:
        reader: for our reads from the peer.
        writer: for our writes to the peer.
        lent: for peers' writes to us.
    """

    reader: StagedReader | None = None
    writer: StagedWriter | None = None
    lent: StagingBufferPool | None = None


class HccsAgent:
    """One agent of an endpoint, which shares the endpoint's engine with the others.

    A slice can't be cancelled, but never takes longer than the engine's own timeout. A slice that
    failed moves no more bytes after the call has returned, because the engine closes its link.

    Args:
        engine: the shared engine.
        buffers: staging for many small pieces.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(self, engine: SharedEngine, buffers: AgentStaging) -> None:
        self._engine = engine
        self._buffers = buffers
        self._vendor = engine.join()
        self._regions: dict[int, MemoryRegion] = {}
        self._peer_regions: dict[int, HccsRegionInfo] = {}
        self._target = ""
        self._is_open = True

    def description(self) -> bytes:
        """The engine's session name, by which other engines address it."""
        return self._vendor.session().encode()

    def register(self, key: int, region: MemoryRegion) -> bytes:
        self._engine.register(region)
        self._regions[key] = region
        lent = self._buffers.lent
        return encode(HccsRegionInfo(region.address, lent is not None and lent.can_scatter(region)))

    def deregister(self, key: int) -> None:
        self._engine.deregister(self._regions.pop(key))

    def meet(self, description: bytes) -> None:
        """Store the peer's session name; the engine connects with the first transfer."""
        self._target = description.decode()

    def learn(self, key: int, attachment: bytes) -> None:
        """Store the info of a peer's region; the engines exchange registrations themselves."""
        self._peer_regions[key] = decode_message(attachment, HccsRegionInfo)

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        def move(spans: Spans) -> None:
            self._engine.move(self._target, replace(part, spans=spans))

        if part.is_read:
            is_moved = self._read_runs(part, move)
        else:
            is_moved = self._write_runs(part, move, must_stop)
        if not is_moved:
            move(part.spans)

    def _read_runs(self, part: Slice, read: Callable[[Spans], None]) -> bool:
        """Read many small pieces as whole runs; returns False, without having read anything, if
        that is not faster."""
        keys, reader = set(part.local_keys.tolist()), self._buffers.reader
        if reader is None or len(keys) > 1:
            return False
        return reader.read(self._regions[keys.pop()], part.spans, read)

    def _write_runs(
        self, part: Slice, write: Callable[[Spans], None], must_stop: Callable[[], bool]
    ) -> bool:
        """Write many small pieces as whole runs; returns False, without having written anything, if
        that is not faster."""
        keys, writer = set(part.remote_keys.tolist()), self._buffers.writer
        if writer is None or len(keys) > 1:
            return False
        region = self._peer_regions[keys.pop()]
        return region.takes_runs and writer.write(part.spans, region.address, write, must_stop)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            for key in list(self._regions):
                self.deregister(key)
            self._engine.leave()


class PooledWorkspace:
    """One slot of a workspace pool.

    Args:
        memory: the pool's memory. No tensor is stored, since a tensor would keep freed memory
            alive.
        begin, nbytes: offset and length of the slot, in bytes.
    """

    def __init__(self, memory: Allocation, begin: int, nbytes: int) -> None:
        self._memory = memory
        self._begin = begin
        self._nbytes = nbytes

    @property
    def address(self) -> int:
        return self._memory.region.address + self._begin

    @property
    def _slot(self) -> Tensor:
        """The slot as a flat uint8 tensor on the NPU."""
        return self._memory.tensor[self._begin : self._begin + self._nbytes]

    def put(self, content: bytes) -> None:
        held = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        self._slot.copy_(held)

    def get(self) -> bytes:
        return self._slot.cpu().numpy().tobytes()


class WorkspacePool:
    """Allocator of the slots of one allocation.

    Args:
        memory: allocation from the backend, aligned for its transports; freed by ``close``.
        nbytes: length of the part at its beginning that is divided into slots.
    """

    def __init__(self, memory: Allocation, nbytes: int) -> None:
        self._memory = memory
        self._free = list(range(nbytes // SLOT_BYTES))
        self._lock = threading.Lock()

    @property
    def region(self) -> MemoryRegion:
        """The whole allocation."""
        return self._memory.region

    def workspace(self, nbytes: int) -> PooledWorkspace:
        """Allocate a slot, which is released when the workspace is garbage collected.

        Raises:
            TransportUnavailable: all slots are in use, or a slot is too small.
        """
        with self._lock:
            if not self._free or nbytes > SLOT_BYTES:
                raise TransportUnavailable(NAME, "no NPU memory is left for tokens")
            slot = self._free.pop()
        taken = PooledWorkspace(self._memory, slot * SLOT_BYTES, nbytes)
        weakref.finalize(taken, self._free.append, slot)
        return taken

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.free()
