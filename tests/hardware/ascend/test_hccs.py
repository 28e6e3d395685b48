"""The transport suite over hccs, in the memory of real NPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(300)]


class TestHccs(TransportConformance, TransportProcessConformance):
    """Both ends on one NPU."""

    loader = "hccs"
    allocator = "mooncake_hal.testing.transports_device:first"
    timeout = 60.0
    any_region_address = False

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="npu:0")
