"""Reachability of shm and tcp: hosts, loopback, secrets, ptrace scopes, settings."""

from __future__ import annotations

import errno
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.transports import tls_settings

from mooncake_hal.errors import HalError, PeerLost, TransportUnavailable, VersionMismatch
from mooncake_hal.session import authentication
from mooncake_hal.session.listener import dial
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.session_endpoint import SessionAddress, open_socket
from mooncake_hal.transports.shm import process_memory
from mooncake_hal.transports.shm.shm_transport import VERSION, ShmInfo, load as load_shm
from mooncake_hal.transports.staged import staged_protocol
from mooncake_hal.transports.staged.staged_transport import load as load_staged
from mooncake_hal.transports.tcp import tcp_sockets
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp

TCP = tcp_sockets.TcpAddress(tcp_sockets.VERSION, b"e" * 16, "127.0.0.1", 1, "machine/ns")
SHM = SessionAddress(
    "shm", VERSION, b"e" * 16, "name", 0, authentication.encode(ShmInfo("boot/ns", 1))
)
ELSEWHERE = authentication.encode(ShmInfo("other/ns", 1))


def changed(address: msgspec.Struct, **fields: object) -> bytes:
    return authentication.encode(msgspec.structs.replace(address, **fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"machine": "other/ns"}, "listens on 127.0.0.1 of another host"),
        ({"tls": True}, "one side uses TLS"),
        ({"version": 9}, "one end speaks version 4, the other 9"),
    ],
)
def test_tcp_reports_why_a_peer_is_unreachable(fields: dict[str, object], reason: str) -> None:
    assert reason in (load_tcp().reaches(changed(TCP), changed(TCP, **fields)) or "")


def test_tcp_reaches_other_hosts_by_non_loopback_addresses() -> None:
    there = changed(TCP, machine="other/ns", host="192.0.2.7")
    assert load_tcp().reaches(changed(TCP), there) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"info": ELSEWHERE}, "another host"), ({"version": 9}, "we speak version 2, the peer 9")],
)
def test_shm_reports_why_a_peer_is_unreachable(fields: dict[str, object], reason: str) -> None:
    assert reason in (load_shm().reaches(changed(SHM), changed(SHM, **fields)) or "")


def test_connecting_to_an_unreachable_peer_is_an_error() -> None:
    shm, tcp = load_shm().open(EndpointOptions()), load_tcp().open(EndpointOptions())
    try:
        with pytest.raises(TransportUnavailable, match="another host or in another network"):
            shm.connect(changed(SHM), timeout=1)
        with pytest.raises(TransportUnavailable, match=r"listens on 127\.0\.0\.1 of another host"):
            tcp.connect(changed(TCP), timeout=1)
        with pytest.raises(VersionMismatch, match="we speak version 4, the peer 9"):
            tcp.connect(changed(TCP, version=9), timeout=1)
        with pytest.raises(VersionMismatch, match="we speak version 2, the peer 9"):
            shm.connect(changed(SHM, version=9), timeout=1)
    finally:
        shm.close()
        tcp.close()


def test_tcp_listens_on_loopback_by_default() -> None:
    endpoint = load_tcp().open(EndpointOptions(secret=b"x"))
    address = authentication.decode_address(endpoint.address, tcp_sockets.TcpAddress, "tcp")
    assert (address.host, address.port > 0) == ("127.0.0.1", True)
    endpoint.close()


def test_port_in_use_is_named() -> None:
    endpoint = load_tcp().open(EndpointOptions())
    port = authentication.decode_address(endpoint.address, tcp_sockets.TcpAddress, "tcp").port
    with pytest.raises(OSError, match=f"can't listen on 127.0.0.1 port {port}"):
        load_tcp().open(EndpointOptions(port=port))
    endpoint.close()


def test_wildcard_host_needs_an_advertised_address() -> None:
    with pytest.raises(ValueError, match="set advertise_host to the address for peers"):
        load_tcp().open(EndpointOptions(host="0.0.0.0", secret=b"x"))


def test_public_interface_without_a_secret_is_rejected_unless_allowed() -> None:
    options = EndpointOptions(host="0.0.0.0", advertise_host="127.0.0.1")
    with pytest.raises(ValueError, match=r"listening on 0\.0\.0\.0 without a secret"):
        load_tcp().open(options)
    load_tcp().open(replace(options, allow_no_secret=True)).close()
    load_tcp().open(replace(options, secret=b"x")).close()


def test_device_memory_is_rejected() -> None:
    for transport in (load_shm(), load_tcp()):
        endpoint = transport.open(EndpointOptions())
        with pytest.raises(TransportUnavailable, match="can't reach memory of cuda:0"):
            endpoint.register(MemoryRegion(4096, 4096, device="cuda:0"))
        endpoint.close()


@pytest.mark.parametrize("connections", [0, -1])
def test_connections_below_one_are_rejected(connections: int) -> None:
    for transport in (load_shm(), load_tcp()):
        with pytest.raises(ValueError, match="1 or more"):
            transport.open(EndpointOptions(connections=connections))


def test_incomplete_tls_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TLS needs all of"):
        load_tcp().open(EndpointOptions(extra={"tls_key": "k"}))
    missing = str(tmp_path / "missing.pem")
    names = ("tls_certificate", "tls_key", "tls_authority")
    with pytest.raises(ValueError, match="can't use the TLS files"):
        load_tcp().open(EndpointOptions(extra=dict.fromkeys(names, missing)))


def test_environment_sets_tls_for_every_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do the endpoints of staged, which it opens below."""
    words = (f"{name}={path}" for name, path in tls_settings().items())
    plain = load_tcp().open(EndpointOptions())
    monkeypatch.setenv("MOONCAKE_HAL_TCP", " ".join(words))
    endpoint, staged = (load().open(EndpointOptions()) for load in (load_tcp, load_staged))
    version = tcp_sockets.VERSION
    assert plain.variants == (f"{version}",)
    assert endpoint.variants == (f"{version} tls",)
    assert f"{staged_protocol.VERSION} tcp {version} tls" in staged.variants
    assert load_tcp().reaches(plain.address, endpoint.address) is not None
    for each in (plain, endpoint, staged):
        each.close()


def test_unknown_setting_in_the_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_TCP", "tls=yes")
    with pytest.raises(HalError, match=r"MOONCAKE_HAL_TCP: tcp has no setting \['tls'\]; it has"):
        load_tcp().open(EndpointOptions())


@pytest.mark.parametrize(
    ("scope", "explanation"),
    [("0", "shared mappings"), ("1", "ptrace_scope 1"), ("2", "shared mappings only")],
)
def test_ptrace_scope_is_explained(
    scope: str, explanation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scope"
    path.write_text(scope + "\n")
    monkeypatch.setattr(process_memory, "PTRACE_SCOPE", path)
    monkeypatch.setattr(process_memory, "_has_ptrace_capability", lambda: False)
    assert process_memory.ptrace_scope() == int(scope)
    assert explanation in process_memory.describe_ptrace_scope()
    wanted = "set it to 1 or 0" if scope == "2" else "run both as one user"
    assert wanted in process_memory.explain_refused_call(1)


def test_kernel_without_yama_has_ptrace_scope_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "PTRACE_SCOPE", tmp_path / "missing")
    assert process_memory.ptrace_scope() == 0


def test_unsealable_memory_is_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    fd = os.memfd_create("unsealable")
    os.ftruncate(fd, 4096)
    endpoint = load_shm().open(EndpointOptions())
    with caplog.at_level(logging.WARNING):
        endpoint.register(MemoryRegion(4096, 4096, fd=fd))
    assert "can't be sealed against shrinking" in caplog.text
    endpoint.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENETUNREACH, "Network is unreachable"), TransportUnavailable),
        (socket.gaierror(-2, "Name or service not known"), TransportUnavailable),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), PeerLost),
    ],
)
def test_only_an_unroutable_host_falls_back_to_the_next_transport(
    error: OSError, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise error

    monkeypatch.setattr("mooncake_hal.transports.session_endpoint.socket.create_connection", refuse)
    address = SessionAddress("rdma", 2, b"e" * 16, "10.0.0.9", 7000, b"")
    with pytest.raises(raised, match=r"10\.0\.0\.9:7000"):
        dial(
            lambda seconds: open_socket(address, seconds),
            "10.0.0.9:7000",
            authentication.Credentials(b"s", "rdma", 2),
            address.epoch,
            1.0,
        )
