"""This machine's first GPU for tests and benchmarks that need one, and buffers on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mooncake_hal.backend import Backend
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.testing.backends import load_backend
from mooncake_hal.transport import MemoryRegion


def require_cuda() -> Backend:
    """The CUDA backend, bound to its first device; skips if it is unavailable, with the reason."""
    try:
        backend = load_backend("cuda")
    except BackendUnavailable as exc:
        pytest.skip(str(exc))
    backend.runtime.bind_thread(0)
    return backend


class DeviceBuffer:
    """Memory of the first GPU, allocated by the CUDA backend."""

    def __init__(self, nbytes: int) -> None:
        backend = load_backend("cuda")
        backend.runtime.bind_thread(0)
        self._allocation = backend.memory.allocate(nbytes, 0)

    @property
    def region(self) -> MemoryRegion:
        return self._allocation.region

    def put(self, content: NDArray[np.uint8]) -> None:
        self._allocation.tensor.copy_(torch.from_numpy(content))
        torch.cuda.synchronize()

    def get(self) -> NDArray[np.uint8]:
        return self._allocation.tensor.cpu().numpy()

    def close(self) -> None:
        self._allocation.free()


def allocate(nbytes: int) -> DeviceBuffer:
    """See ``transports_buffers.resolve``."""
    return DeviceBuffer(nbytes)
