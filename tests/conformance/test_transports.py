"""The transport conformance suite, over every transport of this repository."""

from __future__ import annotations

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance

ANONYMOUS = "mooncake_hal.testing.transports_buffers:anonymous"
MAPPABLE = "mooncake_hal.testing.transports_buffers:mappable"


class TestShmByCall(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.shm.transport:load"
    allocator = ANONYMOUS


class TestShmByMapping(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.shm.transport:load"
    allocator = MAPPABLE


class TestTcp(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.tcp.transport:load"
    allocator = ANONYMOUS
