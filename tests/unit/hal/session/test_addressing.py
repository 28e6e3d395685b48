"""Where endpoints listen, and which address they advertise to peers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from support.adapter_engine import load as load_adapter
from support.ports import free_range

from mooncake_hal.errors import PortsExhausted
from mooncake_hal.port_range import PortRange
from mooncake_hal.session import authentication
from mooncake_hal.session.addressing import advertised_host, open_listener
from mooncake_hal.transport import EndpointOptions, Transport
from mooncake_hal.transports.session_endpoint import SessionAddress
from mooncake_hal.transports.tcp import tcp_sockets
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp

OPTIONS = EndpointOptions(secret=b"listening")


@contextmanager
def held(host: str, *ports: int) -> Iterator[None]:
    listeners = [socket.create_server((host, port)) for port in ports]
    yield
    for listener in listeners:
        listener.close()


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_first_free_port_of_a_range_is_used() -> None:
    ports = free_range(3)
    with held("127.0.0.1", ports.first):
        options = replace(OPTIONS, port_range=ports)
        with closing(open_listener(options, "tcp", 8)) as one:
            assert port_of(one) == ports.first + 1
            with closing(open_listener(options, "tcp", 8)) as two:
                assert port_of(two) == ports.last
                with pytest.raises(PortsExhausted, match=f"tcp: all ports of {ports} are taken"):
                    open_listener(options, "tcp", 8)
            with closing(open_listener(replace(options, host="127.0.0.2"), "tcp", 8)) as other:
                assert port_of(other) == ports.first


def test_explicit_port_may_lie_outside_the_range() -> None:
    ports = free_range(3)
    options = replace(OPTIONS, port=ports.last, port_range=PortRange(ports.first, ports.first))
    with closing(open_listener(options, "tcp", 8)) as found:
        assert port_of(found) == ports.last


def test_other_bind_errors_end_the_port_search() -> None:
    options = replace(OPTIONS, host="192.0.2.1", port_range=PortRange(20_000, 20_001))
    with pytest.raises(OSError, match=r"can't listen on 192.0.2.1 port 20000"):
        open_listener(options, "tcp", 8)


def test_wildcard_host_accepts_both_address_families() -> None:
    options = replace(OPTIONS, host="::", advertise_host="127.0.0.1")
    with closing(open_listener(options, "tcp", 8)) as listener:
        assert advertised_host(options, listener) == "127.0.0.1"
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port_of(listener)), 5).close()


Loader = Callable[[], Transport]
BOTH = pytest.mark.parametrize(
    ("load", "kind"),
    [(load_tcp, tcp_sockets.TcpAddress), (load_adapter, SessionAddress)],
    ids=["tcp", "control"],
)


@BOTH
@pytest.mark.parametrize(
    ("host", "advertised"),
    [("127.0.0.1", None), ("::1", None), ("0.0.0.0", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")],
)
def test_endpoints_listen_and_advertise_as_configured(
    load: Loader, kind: type[tcp_sockets.TcpAddress], host: str, advertised: str | None
) -> None:
    ports = free_range(1, host)
    options = replace(OPTIONS, host=host, advertise_host=advertised, port_range=ports)
    with closing(load().open(options)) as endpoint:
        address = authentication.decode_address(endpoint.address, kind, endpoint.transport)
        assert address.port == ports.first
        assert address.host == (advertised or host)


@BOTH
def test_wildcard_host_needs_an_advertised_host(
    load: Loader, kind: type[tcp_sockets.TcpAddress]
) -> None:
    with pytest.raises(ValueError, match="set advertise_host"):
        load().open(replace(OPTIONS, host="0.0.0.0"))


@pytest.mark.parametrize("text", ["", "x", "5-", "-5", "0-5", "7-6", "1-65536", "1-2-3"])
def test_invalid_port_range_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="wanted a range of ports such as 14000-14099"):
        PortRange.parse(text)


def test_port_range_round_trips() -> None:
    assert PortRange.parse("21000-21099") == PortRange(21_000, 21_099)
    assert (str(PortRange.parse("21000")), len(PortRange.parse("21000"))) == ("21000-21000", 1)
