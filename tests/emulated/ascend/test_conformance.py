"""The conformance suite over the Ascend backend on the emulated device."""

from __future__ import annotations

import pytest

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends import BackendConformance, load_backend


class TestAscend(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return load_backend("ascend")  # not skipped: the emulated device is always available
