"""Tests that need an Ascend NPU; without one, each is skipped with the probe's reason."""

from __future__ import annotations

import pytest

from mooncake_hal.backend import Backend
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.testing.backends import load_backend


@pytest.fixture(scope="session")
def ascend() -> Backend:
    try:
        return load_backend("ascend")
    except BackendUnavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture(autouse=True)
def bound(ascend: Backend) -> None:
    """Every test runs on the first device."""
    ascend.runtime.bind_thread(0)
