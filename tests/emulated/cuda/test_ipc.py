"""The transport suite over ``cuda_ipc`` on the emulated device; needs TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions


class TestIpc(TransportConformance, TransportProcessConformance):
    loader = "support.cuda_emulation:load_ipc"
    allocator = "support.cuda_emulation:allocate"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")
