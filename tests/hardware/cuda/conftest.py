"""Tests that need an NVIDIA GPU; without one each is a skip with the probe's reason."""

from __future__ import annotations

import pytest

from mooncake_hal.backend import Backend
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.testing.backends import load_backend


@pytest.fixture(scope="session")
def cuda() -> Backend:
    try:
        return load_backend("cuda")
    except BackendUnavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture(autouse=True)
def bound(cuda: Backend) -> None:
    """Every test computes on the first device."""
    cuda.runtime.bind_thread(0)
