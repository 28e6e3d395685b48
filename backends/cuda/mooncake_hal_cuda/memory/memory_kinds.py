"""Which kind of memory KV lies in: what each device can share, and the kind that is taken."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from mooncake_hal.errors import CapabilityError, DeviceError
from mooncake_hal_cuda import cuda_env
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.memory.nvlink_domain import CHANNELS, NvlinkDomain, NvlinkFabric
from mooncake_hal_cuda.memory.virtual_memory import Attribute, HandleType, VirtualMemory

AUTO = "auto"

logger = logging.getLogger(__name__)


class MemoryKind(Enum):
    """How other processes map the memory.

    IPC: by the name of a whole allocation (cuIpcGetMemHandle); processes of one host.
    DESCRIPTOR: by a file descriptor that is passed to them; processes of one host.
    FABRIC: by a handle that is valid in the whole NVLink domain, on other hosts too.
    """

    IPC = "ipc"
    DESCRIPTOR = "fd"
    FABRIC = "fabric"


KINDS = (AUTO, *(kind.value for kind in MemoryKind))
"""What MOONCAKE_HAL_CUDA_MEMORY may be."""


@dataclass(frozen=True, slots=True)
class SharingCapabilities:
    """What a device can do.

    Args:
        no_descriptors: why its memory can't be had by descriptor; empty if it can.
        no_fabric: why it can't be had through the fabric; empty if it can.
        domain: that it is in; only where it can.
        is_rdma: whether such memory can be registered with NICs.
    """

    no_descriptors: str
    no_fabric: str
    domain: NvlinkDomain | None
    is_rdma: bool


@dataclass(frozen=True, slots=True)
class SharingDecision:
    """What was decided for a device.

    Args:
        kind: of its memory.
        reason: why none of the better ones.
        domain: that other hosts' processes find it in; only of kind FABRIC.
        is_rdma: whether it is allocated for NICs too.
    """

    kind: MemoryKind
    reason: str
    domain: NvlinkDomain | None
    is_rdma: bool


def decide_sharing(wanted: str, capabilities: SharingCapabilities) -> SharingDecision:
    """The kind with the longest reach that the device has, or the one that was asked for.

    Raises:
        CapabilityError: the device does not have that one; the message says why.
    """
    refusals = {
        MemoryKind.FABRIC: capabilities.no_fabric,
        MemoryKind.DESCRIPTOR: capabilities.no_descriptors,
        MemoryKind.IPC: "",
    }
    if wanted == AUTO:
        kind = next(kind for kind, refusal in refusals.items() if not refusal)
        better = (f"no {kind.value}: {refusal}" for kind, refusal in refusals.items() if refusal)
        reason = "; ".join(better) if kind is not MemoryKind.FABRIC else "other hosts reach it"
    else:
        kind, reason = MemoryKind(wanted), "it was asked for"
        if refusals[kind]:
            raise CapabilityError(
                f"memory of kind {wanted!r} was asked for (MOONCAKE_HAL_CUDA_MEMORY), but "
                f"{refusals[kind]}; use 'auto'"
            )
    domain = capabilities.domain if kind is MemoryKind.FABRIC else None
    return SharingDecision(
        kind, reason, domain, capabilities.is_rdma and kind is not MemoryKind.IPC
    )


HANDLE_TYPES = {
    MemoryKind.DESCRIPTOR: HandleType.POSIX_FILE_DESCRIPTOR,
    MemoryKind.FABRIC: HandleType.FABRIC | HandleType.POSIX_FILE_DESCRIPTOR,
}
"""What memory of a kind is made with: processes of one host need no fabric for fabric memory."""


class DeviceSharing:
    """The driver, and what was decided for each device.

    Args:
        driver: of the hardware.
        fabric: what is known of the NVLink domain; another one only in tests.
    """

    def __init__(self, driver: CudaDriver, fabric: NvlinkFabric | None = None) -> None:
        self.driver = driver
        self.virtual = VirtualMemory(driver)
        self._fabric = fabric or NvlinkFabric()
        self._decided: dict[int, SharingDecision] = {}

    def of(self, index: int) -> SharingDecision:
        """What was decided for a device; the first time, it is found out and logged.

        Raises:
            CapabilityError: MOONCAKE_HAL_CUDA_MEMORY wants what the device does not have.
            DeviceError: there is no such device.
        """
        if index not in self._decided:
            sharing = decide_sharing(cuda_env.memory_kind(KINDS), self.capabilities(index))
            logger.info(
                "memory of cuda:%d is of kind %s: %s", index, sharing.kind.value, sharing.reason
            )
            self._decided[index] = sharing
        return self._decided[index]

    def capabilities(self, index: int) -> SharingCapabilities:
        """What a device can do. Memory of each kind is made and shared once, since attributes
        promise too much: sandboxes and virtual GPUs have them, and refuse the calls."""
        virtual = self.virtual
        no_descriptors = ""
        if not virtual.has(index, Attribute.VIRTUAL_MEMORY):
            no_descriptors = "the device has no virtual memory management"
        elif not virtual.has(index, Attribute.POSIX_FILE_DESCRIPTOR):
            no_descriptors = "the device exports no descriptors"
        is_rdma = not no_descriptors and virtual.has(index, Attribute.GPU_DIRECT_RDMA)
        if is_rdma and self._why_no_descriptors(index, is_rdma=True):
            is_rdma = False  # rather no NIC than no descriptor
        if not no_descriptors and not is_rdma:
            no_descriptors = self._why_no_descriptors(index, is_rdma=False)
        domain, no_fabric = None, no_descriptors
        if not no_descriptors:
            try:
                domain = self._find_domain(index)
            except DeviceError as exc:
                no_fabric = str(exc)
        return SharingCapabilities(no_descriptors, no_fabric, domain, is_rdma)

    def _why_no_descriptors(self, index: int, *, is_rdma: bool) -> str:
        """Make memory, export it, map it by its descriptor; what the driver refused, or nothing."""
        self.driver.bind(index)
        with ExitStack() as undo:
            try:
                kind = HANDLE_TYPES[MemoryKind.DESCRIPTOR]
                mapped = self.virtual.allocate(1, index, kind, is_rdma=is_rdma)
                undo.callback(mapped.close)
                descriptor = self.virtual.export_descriptor(mapped.address)
                undo.callback(os.close, descriptor)
                _, nbytes = self.driver.allocation_of(mapped.address)
                self.virtual.open_descriptor(descriptor, nbytes, index).close()
            except DeviceError as exc:
                return str(exc)
        return ""

    def why_no_access(self, ours: bytes, theirs: bytes) -> str | None:
        """Say why a device can't use another one's memory, or None; by their UUIDs.

        One that CUDA_VISIBLE_DEVICES hides from this process can't be asked about: whether its
        memory can be mapped shows when it is.
        """
        known = self._indices
        if theirs == ours or not {ours, theirs} <= known.keys():
            return None
        if self.driver.can_access(known[ours], known[theirs]):
            return None
        return f"cuda:{known[ours]} has no peer access to cuda:{known[theirs]}; see nvidia-smi topo"

    def why_no_atomics(self, ours: bytes, theirs: bytes) -> str | None:
        """Say why a device has no atomic operations on another one's memory, or None; by UUIDs."""
        if theirs == ours:
            return None
        known = self._indices
        if not {ours, theirs} <= known.keys():
            return "CUDA_VISIBLE_DEVICES hides a peer's device, whose link can't be asked about"
        if (reason := self.why_no_access(ours, theirs)) is not None:
            return reason
        if self.driver.has_atomics(known[ours], known[theirs]):
            return None
        return f"no NVLink joins cuda:{known[ours]} and cuda:{known[theirs]}; see nvidia-smi topo"

    @cached_property
    def _indices(self) -> dict[bytes, int]:
        """The devices' numbers by their UUIDs."""
        return {self.driver.uuid(index): index for index in range(self.driver.count())}

    def _find_domain(self, index: int) -> NvlinkDomain:
        """The domain in which memory of a device can be shared; DeviceError if in none."""
        if not self.virtual.has(index, Attribute.FABRIC):
            raise DeviceError("the device has no fabric handles")
        if not self._fabric.has_channel():
            raise DeviceError(f"no IMEX channel can be read ({CHANNELS}/channel*)")
        domain = self._fabric.domain(self.driver.uuid(index))
        self.driver.bind(index)
        self.virtual.allocate(1, index, HANDLE_TYPES[MemoryKind.FABRIC], is_rdma=False).close()
        return domain
