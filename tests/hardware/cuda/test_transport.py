"""The transport suite over ``cuda_ipc`` and ``staged``, on a real device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions


@pytest.mark.cuda
class TestCudaIpc(TransportConformance, TransportProcessConformance):
    loader = "cuda_ipc"
    allocator = "support.cuda_device:allocate"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")


@pytest.mark.cuda
class TestStaged(TransportConformance, TransportProcessConformance):
    loader = "staged"
    allocator = "support.cuda_device:allocate"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")
