"""Everything that a backend's author has to write to test every op, the memory and the runtime."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.backends import BackendBasics
from mooncake_hal.testing.backends_host_copies import HostCopiesSuite
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite
from mooncake_hal.testing.transports_staged import StagedBetweenKinds


class TestMyChip(BackendBasics, OpsSuite, RowsSuite, HostCopiesSuite):
    """``BackendConformance`` also tests collectives, which this chip does not have yet."""

    backend_name = "mychip"
    is_simulated = True  # a real chip: leave it out


class TestStaged(StagedBetweenKinds):
    """KV between the chip and a host; ``transports_staged`` explains how to run the whole suite."""

    device = "mychip:0"

    @pytest.fixture(autouse=True)
    def on_the_chip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the suite allocate its buffers from this backend."""
        monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "mychip")
