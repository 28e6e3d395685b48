"""The transport conformance suite, over every transport of this repository."""

from __future__ import annotations

from dataclasses import replace

from support.transports import tls_settings

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions

ANONYMOUS = "mooncake_hal.testing.transports_buffers:anonymous"
MAPPABLE = "mooncake_hal.testing.transports_buffers:mappable"


class TestShmByCall(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.shm.shm_transport:load"
    allocator = ANONYMOUS


class TestShmByMapping(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.shm.shm_transport:load"
    allocator = MAPPABLE


class TestShmInterpreted(TransportConformance, TransportProcessConformance):
    """What shm falls back to where there is no compiler."""

    loader = "mooncake_hal.transports.shm.shm_transport:load_interpreted"
    allocator = MAPPABLE


class TestTcp(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.tcp.tcp_transport:load"
    allocator = ANONYMOUS


class TestTcpInterpreted(TransportConformance, TransportProcessConformance):
    """What tcp falls back to where there is no compiler, and what TLS runs on."""

    loader = "mooncake_hal.transports.tcp.tcp_transport:load_interpreted"
    allocator = ANONYMOUS


class TestTcpIpv6(TransportConformance):
    loader = "mooncake_hal.transports.tcp.tcp_transport:load"

    def options(self) -> EndpointOptions:
        return replace(super().options(), host="::1", connections=3)


class TestTcpTls(TransportConformance):
    loader = "mooncake_hal.transports.tcp.tcp_transport:load"

    def options(self) -> EndpointOptions:
        return replace(super().options(), extra=tls_settings())


class TestStaged(TransportConformance, TransportProcessConformance):
    """Over a device whose memory is the host's; those of devices: where their backends are."""

    loader = "support.host_device:load_staged_over_tcp"
    allocator = "support.host_device:allocate"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="test:0")


class TestAdapter(TransportConformance):
    """What mooncake and nixl share, over an engine of our own; theirs: ci/test-adapters."""

    loader = "support.adapter_engine:load"
