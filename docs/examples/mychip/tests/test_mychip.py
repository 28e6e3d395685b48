"""All that the chip's owner writes to have every op, the memory and the runtime tested."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.backends import BackendBasics
from mooncake_hal.testing.backends_host_copies import HostCopiesSuite
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite
from mooncake_hal.testing.transports_staged import StagedBetweenKinds


class TestMyChip(BackendBasics, OpsSuite, RowsSuite, HostCopiesSuite):
    """``BackendConformance`` has the collectives too; this chip has none yet."""

    backend_name = "mychip"


class TestStaged(StagedBetweenKinds):
    """KV between the chip and a host; ``transports_staged`` says how to run the whole suite."""

    device = "mychip:0"

    @pytest.fixture(autouse=True)
    def on_the_chip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Buffers of the suite are the backend's that is named here."""
        monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "mychip")
