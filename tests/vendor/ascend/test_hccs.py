"""The transport suite over mooncake's real Ascend engine; the HIXL stub moves the bytes."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from mooncake_hal.testing.transports import TransportConformance, TransportKit
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _no_endpoints_of_earlier_cases() -> None:
    """Each endpoint has 36 MiB of the device's 1 GiB; closed endpoints that are part of a reference
    cycle keep theirs until garbage collection."""
    gc.collect()


class OverHccs(TransportKit):
    timeout = 60.0
    any_region_address = False
    registers_4_gib = False  # the device has less

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="npu:0")


class TestMooncake(OverHccs, TransportConformance):
    """In memory of torch-npu's allocator."""

    loader = "support.vendor_npu:load_mooncake"
    allocator = "support.vendor_npu:NpuBuffer"


class TestMooncakeProcesses(OverHccs, TransportProcessConformance):
    loader = "support.vendor_npu:load_mooncake_alone"
    allocator = "support.fake_hccs:NpuBuffer"
