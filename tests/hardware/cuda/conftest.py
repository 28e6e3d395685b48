"""Tests that need an NVIDIA GPU; without one, each is skipped with the probe's reason."""

from __future__ import annotations

import pytest
from support.cuda_device import require_cuda

from mooncake_hal.backend import Backend


@pytest.fixture(scope="session")
def cuda() -> Backend:
    return require_cuda()


@pytest.fixture(autouse=True)
def bound(cuda: Backend) -> None:
    """Every test runs on the first device."""
    cuda.runtime.bind_thread(0)
