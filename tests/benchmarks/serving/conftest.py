"""Serve a random model of the shape in MOONCAKE_SERVING_SHAPE, on MOONCAKE_HAL_BACKEND."""

from __future__ import annotations

import os

import pytest
from support.served_streams import Served, bandwidth
from support.speed_models import chosen_shape

from mooncake_hal.backend import Backend
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.testing.backends import load_backend


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The backend named by the stage; without its device, a skip with the probe's reason."""
    try:
        return load_backend(os.environ.get("MOONCAKE_HAL_BACKEND", "cuda"))
    except BackendUnavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def served(backend: Backend) -> Served:
    """The model; the device's read bandwidth is measured before it is served."""
    shape = chosen_shape()
    bandwidth(backend.name, shape.copy_bytes)
    return Served.make(shape, backend)
