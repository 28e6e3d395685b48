"""KV memory from the driver itself: other processes can map it, and NICs can register it.

Torch's allocator hands out pieces of larger allocations, which only a whole one's name reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mooncake_hal.allocation import TensorAllocation
from mooncake_hal.backend import DeviceInfo
from mooncake_hal.errors import DeviceError, OutOfMemory
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_cuda.driver import CudaDriver

GRANULE = 2 << 20
"""The driver gives smaller allocations out of shared ones, which would be exported with them."""

View = Callable[[int, int, int], Tensor]
"""Makes a flat uint8 tensor of (address, bytes, device index) without copying."""


class CudaMemory:
    """See ``Memory``.

    Args:
        driver: allocates.
        devices: what there is.
        view: makes tensors; another one only in tests.
    """

    def __init__(
        self, driver: CudaDriver, devices: Sequence[DeviceInfo], view: View | None = None
    ) -> None:
        self._driver = driver
        self._devices = devices
        self._view = view or device_view

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        """See ``Memory``."""
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
            address = self._driver.allocate(whole)
        except OutOfMemory as exc:
            raise refusal from exc
        region = MemoryRegion(address, nbytes, f"cuda:{index}")

        def release() -> None:
            self._driver.bind(index)
            self._driver.free(address)

        return TensorAllocation(region, self._view(address, nbytes, index), release)


class _Exposed:
    """Device memory in the form that torch takes over without a copy (CUDA Array Interface 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_view(address: int, nbytes: int, index: int) -> Tensor:
    """A flat uint8 tensor over device memory; it does not own it."""
    return torch.as_tensor(_Exposed(address, nbytes), device=torch.device("cuda", index))
