"""Chooses the kind of KV memory for each device, by what the device can share."""

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

    IPC: by the CUDA IPC handle of a whole allocation (cuIpcGetMemHandle), on the same host.
    DESCRIPTOR: by a file descriptor that they receive, on the same host.
    FABRIC: by a handle that is valid in the whole NVLink domain, on other hosts too.
    """

    IPC = "ipc"
    DESCRIPTOR = "fd"
    FABRIC = "fabric"


KINDS = (AUTO, *(kind.value for kind in MemoryKind))
"""Values of MOONCAKE_HAL_CUDA_MEMORY."""


@dataclass(frozen=True, slots=True)
class SharingCapabilities:
    """How a device's memory can be shared.

    Args:
        no_descriptors: why it can't be shared by descriptor; empty if it can.
        no_fabric: why it can't be shared by fabric handle; empty if it can.
        domain: the device's NVLink domain; None if fabric handles can't be used.
        is_rdma: whether memory that is shared by descriptor can also be registered with NICs; what
            is shared by fabric handle then can, too.
    """

    no_descriptors: str
    no_fabric: str
    domain: NvlinkDomain | None
    is_rdma: bool


@dataclass(frozen=True, slots=True)
class SharingDecision:
    """The memory kind that was chosen for a device.

    Args:
        kind: the kind.
        reason: why none of the preferred kinds was chosen.
        domain: NVLink domain in which other hosts can map the memory; only for kind FABRIC.
        is_rdma: whether memory is allocated so that NICs can register it.
    """

    kind: MemoryKind
    reason: str
    domain: NvlinkDomain | None
    is_rdma: bool


def decide_sharing(wanted: str, capabilities: SharingCapabilities) -> SharingDecision:
    """Choose the requested kind, or with AUTO the supported kind with the longest reach.

    Raises:
        CapabilityError: the device does not support the requested kind; the message says why.
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
        kind, reason = MemoryKind(wanted), f"MOONCAKE_HAL_CUDA_MEMORY={wanted} requests it"
        if refusals[kind]:
            raise CapabilityError(
                f"MOONCAKE_HAL_CUDA_MEMORY={wanted} requests this kind of memory, but "
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
"""Handle types that memory of a kind is created with. Fabric memory has a descriptor too, so that
processes on the same host can map it without the fabric."""


class DeviceSharing:
    """The driver, and the memory kind of each device.

    Args:
        driver: the driver.
        fabric: finds a device's NVLink domain; replaced only in tests.
    """

    def __init__(self, driver: CudaDriver, fabric: NvlinkFabric | None = None) -> None:
        self.driver = driver
        self.virtual = VirtualMemory(driver)
        self._fabric = fabric or NvlinkFabric()
        self._decided: dict[int, SharingDecision] = {}

    def of(self, index: int) -> SharingDecision:
        """The decision for a device, which the first call makes and logs.

        Raises:
            CapabilityError: the device does not support the kind in MOONCAKE_HAL_CUDA_MEMORY.
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
        """Find out how a device's memory can be shared.

        Memory of each kind is allocated and shared once for a test, because attributes are not
        reliable: sandboxes and virtual GPUs report them, but refuse the calls.
        """
        virtual = self.virtual
        no_descriptors = ""
        if not virtual.has(index, Attribute.VIRTUAL_MEMORY):
            no_descriptors = "the device has no virtual memory management"
        elif not virtual.has(index, Attribute.POSIX_FILE_DESCRIPTOR):
            no_descriptors = "the device exports no descriptors"
        is_rdma = not no_descriptors and virtual.has(index, Attribute.GPU_DIRECT_RDMA)
        if is_rdma and self._no_descriptors_reason(index, is_rdma=True):
            is_rdma = False  # descriptors matter more than NICs
        if not no_descriptors and not is_rdma:
            no_descriptors = self._no_descriptors_reason(index, is_rdma=False)
        domain, no_fabric = None, no_descriptors
        if not no_descriptors:
            try:
                domain = self._find_domain(index, is_rdma=is_rdma)
            except DeviceError as exc:
                no_fabric = str(exc)
        return SharingCapabilities(no_descriptors, no_fabric, domain, is_rdma)

    def _no_descriptors_reason(self, index: int, *, is_rdma: bool) -> str:
        """Allocate memory, export it and map it by its descriptor; returns the driver's error, or
        an empty string."""
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

    def no_access_reason(self, ours: bytes, theirs: bytes) -> str | None:
        """The reason why a device can't access another device's memory, or None; both by UUID.

        The driver can't be queried about a device that CUDA_VISIBLE_DEVICES hides from this
        process. For such a device the answer is None, and mapping its memory may fail later.
        """
        known = self._indices
        if theirs == ours or not {ours, theirs} <= known.keys():
            return None
        if self.driver.can_access(known[ours], known[theirs]):
            return None
        return f"cuda:{known[ours]} has no peer access to cuda:{known[theirs]}; see nvidia-smi topo"

    def enable_access(self, ours: bytes, theirs: bytes) -> None:
        """Let a device of this process access what another one has from ``cuMemAlloc``; both by
        UUID."""
        if ours != theirs:
            self.driver.enable_access(self._indices[ours], self._indices[theirs])

    def no_atomics_reason(self, ours: bytes, theirs: bytes) -> str | None:
        """The reason why a device has no atomic operations on another device's memory, or None;
        both by UUID."""
        if theirs == ours:
            return None
        known = self._indices
        if not {ours, theirs} <= known.keys():
            return "CUDA_VISIBLE_DEVICES hides a peer's device, so its link can't be queried"
        if (reason := self.no_access_reason(ours, theirs)) is not None:
            return reason
        if self.driver.has_atomics(known[ours], known[theirs]):
            return None
        return (
            f"no NVLink connects cuda:{known[ours]} and cuda:{known[theirs]}; see nvidia-smi topo"
        )

    @cached_property
    def _indices(self) -> dict[bytes, int]:
        """Indices of the visible devices by UUID."""
        return {self.driver.uuid(index): index for index in range(self.driver.count())}

    def _find_domain(self, index: int, *, is_rdma: bool) -> NvlinkDomain:
        """The NVLink domain in which a device's memory can be shared. Memory is exported and mapped
        for a test: without a working IMEX service it can be allocated, but not exported.

        Raises:
            DeviceError: there is none; the message says why.
        """
        if not self.virtual.has(index, Attribute.FABRIC):
            raise DeviceError("the device has no fabric handles")
        if not self._fabric.has_channel():
            raise DeviceError(f"no IMEX channel can be read ({CHANNELS}/channel*)")
        domain = self._fabric.domain(self.driver.uuid(index))
        self.driver.bind(index)
        kind = HANDLE_TYPES[MemoryKind.FABRIC]
        with ExitStack() as undo:
            mapped = self.virtual.allocate(1, index, kind, is_rdma=is_rdma)
            undo.callback(mapped.close)
            handle = self.virtual.export_fabric(mapped.address)
            _, nbytes = self.driver.allocation_of(mapped.address)
            self.virtual.open_fabric(handle, nbytes, index).close()
        return domain
