"""The transport suite over hccs, in the emulated NPU's memory and between processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions


@pytest.fixture(autouse=True)
def on_the_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers, which are processes of their own, inherit the variable."""
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "ascend")


class TestHccs(TransportConformance, TransportProcessConformance):
    """Both ends on one NPU."""

    loader = "hccs"
    allocator = "mooncake_hal.testing.transports_device:first"
    timeout = 60.0
    any_region_address = False
    registers_4_gib = False  # the device has less

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="npu:0")
