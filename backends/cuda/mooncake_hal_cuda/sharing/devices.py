"""Finds out how the memory of this process's devices is shared, once for each."""

from __future__ import annotations

import logging
from functools import cached_property

from mooncake_hal.errors import DeviceError
from mooncake_hal_cuda import env
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.sharing.choice import KINDS, MemoryKind, Sharing, SharingFacts, decide
from mooncake_hal_cuda.sharing.fabric import CHANNELS, Domain, Fabric
from mooncake_hal_cuda.sharing.virtual import Attribute, HandleType, VirtualMemory

logger = logging.getLogger(__name__)

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

    def __init__(self, driver: CudaDriver, fabric: Fabric | None = None) -> None:
        self.driver = driver
        self.virtual = VirtualMemory(driver)
        self._fabric = fabric or Fabric()
        self._decided: dict[int, Sharing] = {}

    def of(self, index: int) -> Sharing:
        """What was decided for a device; the first time, it is found out and logged.

        Raises:
            CapabilityError: MOONCAKE_HAL_CUDA_MEMORY wants what the device does not have.
            DeviceError: there is no such device.
        """
        if index not in self._decided:
            sharing = decide(env.memory_kind(KINDS), self.facts(index))
            logger.info(
                "memory of cuda:%d is of kind %s: %s", index, sharing.kind.value, sharing.reason
            )
            self._decided[index] = sharing
        return self._decided[index]

    def facts(self, index: int) -> SharingFacts:
        """What a device can do. Fabric memory is tried, since attributes promise too much."""
        virtual = self.virtual
        no_descriptors = ""
        if not virtual.has(index, Attribute.VIRTUAL_MEMORY):
            no_descriptors = "the device has no virtual memory management"
        elif not virtual.has(index, Attribute.POSIX_FILE_DESCRIPTOR):
            no_descriptors = "the device exports no descriptors"
        domain, no_fabric = None, no_descriptors
        is_rdma = virtual.has(index, Attribute.GPU_DIRECT_RDMA)
        if not no_descriptors:
            try:
                domain = self._find_domain(index)
            except DeviceError as exc:
                no_fabric = str(exc)
        return SharingFacts(no_descriptors, no_fabric, domain, is_rdma)

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

    @cached_property
    def _indices(self) -> dict[bytes, int]:
        """The devices' numbers by their UUIDs."""
        return {self.driver.uuid(index): index for index in range(self.driver.count())}

    def _find_domain(self, index: int) -> Domain:
        """The domain in which memory of a device can be shared; DeviceError if in none."""
        if not self.virtual.has(index, Attribute.FABRIC):
            raise DeviceError("the device has no fabric handles")
        if not self._fabric.has_channel():
            raise DeviceError(f"no IMEX channel can be read ({CHANNELS}/channel*)")
        domain = self._fabric.domain(self.driver.uuid(index))
        self.driver.bind(index)
        self.virtual.allocate(1, index, HANDLE_TYPES[MemoryKind.FABRIC], is_rdma=False).close()
        return domain
