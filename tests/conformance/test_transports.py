"""The transport conformance suite, over every transport of this repository.

Transfers of more than 4 GiB take half a minute where Python moves them: there they are left out.
"""

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
    """The fallback of shm without a compiler."""

    loader = "mooncake_hal.transports.shm.shm_transport:load_interpreted"
    allocator = MAPPABLE
    moves_4_gib = False


class TestTcp(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.tcp.tcp_transport:load"
    allocator = ANONYMOUS


class TestTcpInterpreted(TransportConformance, TransportProcessConformance):
    """The fallback of tcp without a compiler, and the path that TLS takes."""

    loader = "mooncake_hal.transports.tcp.tcp_transport:load_interpreted"
    allocator = ANONYMOUS
    moves_4_gib = False


class TestTcpIpv6(TransportConformance):
    loader = "mooncake_hal.transports.tcp.tcp_transport:load"
    moves_4_gib = False

    def options(self) -> EndpointOptions:
        return replace(super().options(), host="::1", connections=3)


class TestTcpTls(TransportConformance):
    loader = "mooncake_hal.transports.tcp.tcp_transport:load"
    moves_4_gib = False

    def options(self) -> EndpointOptions:
        return replace(super().options(), extra=tls_settings())


class TestStaged(TransportConformance, TransportProcessConformance):
    """Over a device in host memory; the backends' own tests use real device memory."""

    loader = "support.host_device:load_staged_over_tcp"
    allocator = "support.host_device:allocate"
    moves_4_gib = False

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="test:0")


class TestAdapter(TransportConformance):
    """The common part of mooncake and nixl, over a test engine; ci/test-adapters runs theirs."""

    loader = "support.adapter_engine:load"
    moves_4_gib = False
