"""Buffers in device memory, for suites and benchmarks of transports.

The backend is the one that ``auto`` selects; set MOONCAKE_HAL_BACKEND to use another one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from mooncake_hal.backend import Backend
from mooncake_hal.registry import Registry
from mooncake_hal.transport import MemoryRegion


@lru_cache(maxsize=1)
def _backend() -> Backend:
    return Registry.discover().select_backend()


class DeviceBuffer:
    """A buffer allocated by the backend.

    Args:
        nbytes: size in bytes.
        index: index of the device.
    """

    def __init__(self, nbytes: int, index: int) -> None:
        self._index = index
        _backend().runtime.bind_thread(index)
        self._allocation = _backend().memory.allocate(nbytes, index)

    @property
    def region(self) -> MemoryRegion:
        return self._allocation.region

    def put(self, content: NDArray[np.uint8]) -> None:
        self._allocation.tensor.copy_(torch.from_numpy(content))
        _backend().runtime.synchronize(self._index)

    def get(self) -> NDArray[np.uint8]:
        _backend().runtime.synchronize(self._index)
        return cast("NDArray[np.uint8]", self._allocation.tensor.cpu().numpy().copy())

    def close(self) -> None:
        self._allocation.free()


def first(nbytes: int) -> DeviceBuffer:
    """Allocate on the first device."""
    return DeviceBuffer(nbytes, 0)


def second(nbytes: int) -> DeviceBuffer:
    """Allocate on the second device, or on the first if it is the only one."""
    return DeviceBuffer(nbytes, min(1, len(_backend().runtime.devices()) - 1))
