"""One vendor engine for all the agents of an endpoint, and an agent's share in it.

An NPU has few links and an engine few regions, so agents do not get an engine each: they share
one, and memory that several of them registered is registered once.
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
"""HIXL takes no more per process; the memory of the workspaces is one of them."""

ALIGNMENT = 2 << 20
"""A page of the NPU: HCCS maps whole ones."""

WORKSPACE_BYTES = 2 << 20
SLOT_BYTES = 512
"""The NPU's own grain; a token is shorter."""


class SharedEngine:
    """Starts an engine for the first agent, ends it with the last.

    Args:
        start: starts it.
        workspaces: the region that tokens and buffers lie in; registered while the engine runs.
        device: of the memory that it takes, such as ``"npu:0"``.
        bind_thread: makes the NPU current in the calling thread.
        needs_pages: whether regions must begin at a page of the NPU.
        ended: called when the last agent has left.
    """

    def __init__(
        self,
        start: Callable[[], VendorEngine],
        workspaces: MemoryRegion,
        device: str,
        bind_thread: Callable[[], None],
        *,
        needs_pages: bool,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._start = start
        self._workspaces = workspaces
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
                self._register_first(self._workspaces)  # a link that is up would not know it
                self._counts[self._workspaces.address] = 1
            self._num_agents += 1
            return self._vendor

    def leave(self) -> None:
        """Let an agent go, which has deregistered everything."""
        with self._lock:
            self._num_agents -= 1
            if self._num_agents == 0 and self._vendor is not None:
                self._withdraw(self._workspaces)
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
        """Withdraw it once; the engine lets go of it with the last registration."""
        whole = self._whole(region)
        with self._lock:
            self._withdraw(whole)

    def move(self, session: str, part: Slice) -> None:
        """Several threads at once."""
        vendor = self._running()
        self._bind_thread()
        if part.is_read:
            vendor.read(session, part.spans)
        else:
            vendor.write(session, part.spans)

    def _whole(self, region: MemoryRegion) -> MemoryRegion:
        start, end = self._workspaces.address, self._workspaces.address + self._workspaces.nbytes
        return self._workspaces if start <= region.address < end else region

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
        except TransferError as exc:  # closing goes on
            logger.warning("%s: the engine keeps memory that was withdrawn: %s", NAME, exc)

    def _running(self) -> VendorEngine:
        if self._vendor is None:
            raise TransferError(f"{NAME}: the engine has been closed")
        return self._vendor


@dataclass(frozen=True, slots=True)
class AgentStaging:
    """How many small pieces go by contiguous runs; where it is None they go piece by piece.

    Args:
        reader: for our reads.
        writer: for our writes to the peer.
        lent: for peers' writes to us.
    """

    reader: StagedReader | None = None
    writer: StagedWriter | None = None
    lent: StagingBufferPool | None = None


class HccsAgent:
    """One agent of an endpoint: it shares the endpoint's engine with the others.

    A slice can't be stopped, and takes no longer than the engine's own deadline. One that failed
    has ended when the call returns: the engine drops its link with it.

    Args:
        engine: which it has a share in.
        buffers: for many small pieces.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(self, engine: SharedEngine, buffers: AgentStaging) -> None:
        self._engine = engine
        self._buffers = buffers
        self._vendor = engine.join()
        self._regions: dict[int, MemoryRegion] = {}
        self._learnt: dict[int, HccsRegionInfo] = {}
        self._target = ""
        self._is_open = True

    def description(self) -> bytes:
        """The name by which other engines call this one."""
        return self._vendor.session().encode()

    def register(self, key: int, region: MemoryRegion) -> bytes:
        self._engine.register(region)
        self._regions[key] = region
        lent = self._buffers.lent
        return encode(HccsRegionInfo(region.address, lent is not None and lent.can_scatter(region)))

    def deregister(self, key: int) -> None:
        self._engine.deregister(self._regions.pop(key))

    def meet(self, description: bytes) -> None:
        """Links come up with the first transfer."""
        self._target = description.decode()

    def learn(self, key: int, attachment: bytes) -> None:
        """The engines exchange what they need by themselves."""
        self._learnt[key] = decode_message(attachment, HccsRegionInfo)

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
        """Read many small pieces as whole runs; False, and nothing done, where that is no gain."""
        keys, reader = set(part.local_keys.tolist()), self._buffers.reader
        if reader is None or len(keys) > 1:
            return False
        return reader.read(self._regions[keys.pop()], part.spans, read)

    def _write_runs(
        self, part: Slice, write: Callable[[Spans], None], must_stop: Callable[[], bool]
    ) -> bool:
        """Write many small pieces as whole runs; False, and nothing done, where that is no gain."""
        keys, writer = set(part.remote_keys.tolist()), self._buffers.writer
        if writer is None or len(keys) > 1:
            return False
        region = self._learnt[keys.pop()]
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
        memory: of the pool. No tensor is kept, which would keep the memory when it is freed.
        begin, nbytes: of the slot in it.
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
        """Flat uint8, on the NPU."""
        return self._memory.tensor[self._begin : self._begin + self._nbytes]

    def put(self, content: bytes) -> None:
        held = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        self._slot.copy_(held)

    def get(self) -> bytes:
        return self._slot.cpu().numpy().tobytes()


class WorkspacePool:
    """The slots of one allocation.

    Args:
        memory: from the backend, aligned as its transports need it; freed with the workspaces.
        nbytes: how much of its beginning is slots; the rest is used otherwise.
    """

    def __init__(self, memory: Allocation, nbytes: int) -> None:
        self._memory = memory
        self._free = list(range(nbytes // SLOT_BYTES))
        self._lock = threading.Lock()

    @property
    def region(self) -> MemoryRegion:
        """All of it."""
        return self._memory.region

    def workspace(self, nbytes: int) -> PooledWorkspace:
        """Take a slot; it is free again when the workspace is dropped.

        Raises:
            TransportUnavailable: all are taken.
        """
        with self._lock:
            if not self._free or nbytes > SLOT_BYTES:
                raise TransportUnavailable(NAME, "there is no NPU memory left for tokens")
            slot = self._free.pop()
        taken = PooledWorkspace(self._memory, slot * SLOT_BYTES, nbytes)
        weakref.finalize(taken, self._free.append, slot)
        return taken

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.free()
