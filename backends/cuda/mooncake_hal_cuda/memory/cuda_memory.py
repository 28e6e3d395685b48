"""Allocates KV memory directly from the driver, so that other processes can map it and NICs can
register it.

Torch's allocator returns parts of larger allocations, but only whole allocations can be shared.
``memory_kinds`` decides once per device which kind of memory is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mooncake_hal.backend import DeviceInfo
from mooncake_hal.backend_parts import TensorAllocation
from mooncake_hal.errors import DeviceError, OutOfMemory
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_cuda.memory.memory_kinds import HANDLE_TYPES, DeviceSharing, MemoryKind

GRANULE = 2 << 20
"""Allocations are rounded up to this size, in bytes. The driver places smaller ones in a common
block, and exporting one would export the whole block."""

View = Callable[[int, int, int], Tensor]
"""Makes a flat uint8 tensor of (address, bytes, device index) without copying."""


class CudaMemory:
    """Allocator of KV memory that other processes can map.

    Args:
        sharing: allocates memory of the kind that was decided for the device.
        devices: the visible devices.
        view: makes tensors over memory; replaced only in tests.
    """

    def __init__(
        self, sharing: DeviceSharing, devices: Sequence[DeviceInfo], view: View | None = None
    ) -> None:
        self._sharing = sharing
        self._driver = sharing.driver
        self._devices = devices
        self._view = view or device_view

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        if not 0 <= index < len(self._devices):
            raise DeviceError(f"cuda has no device {index}, it has {len(self._devices)} here")
        if nbytes <= 0:
            raise DeviceError(f"an allocation needs at least one byte, {nbytes} were asked for")
        self._driver.bind(index)
        free, total = self._driver.memory_bytes()
        whole = -(-nbytes // GRANULE) * GRANULE
        refusal = OutOfMemory(
            f"{nbytes} bytes were asked for, {free} of {total} bytes are free on cuda:{index}; "
            "use fewer KV blocks or free memory of this device"
        )
        if whole > free:
            raise refusal
        try:
            address, release = self._allocate(whole, index)
        except OutOfMemory as exc:
            raise refusal from exc
        region = MemoryRegion(address, nbytes, f"cuda:{index}")
        return TensorAllocation(region, self._view(address, nbytes, index), release)

    def _allocate(self, nbytes: int, index: int) -> tuple[int, Callable[[], None]]:
        """Allocate memory of the decided kind; returns (address, function that frees it)."""
        decided = self._sharing.of(index)
        if decided.kind is not MemoryKind.IPC:
            types = HANDLE_TYPES[decided.kind]
            mapped = self._sharing.virtual.allocate(nbytes, index, types, is_rdma=decided.is_rdma)
            address, close = mapped.address, mapped.close
        else:
            address = self._driver.allocate(nbytes)
            close = partial(self._driver.free, address)

        def release() -> None:
            self._driver.bind(index)
            self._driver.synchronize()  # unmapping does not wait for kernels that use the memory
            close()

        return address, release


class _Exposed:
    """Device memory in a form that torch can wrap without a copy (CUDA Array Interface 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_view(address: int, nbytes: int, index: int) -> Tensor:
    """A flat uint8 tensor over device memory, which it does not own."""
    return torch.as_tensor(_Exposed(address, nbytes), device=torch.device("cuda", index))
