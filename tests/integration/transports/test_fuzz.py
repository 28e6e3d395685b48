"""Malformed bytes from peers: an endpoint rejects them, continues to serve, and touches no other
memory."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal.session import authentication, frames
from mooncake_hal.session.listener import run_handshake
from mooncake_hal.testing.transports import TransportKit, one_span
from mooncake_hal.testing.transports_buffers import Buffer
from mooncake_hal.transport import Endpoint
from mooncake_hal.transports.adapters import adapter_messages
from mooncake_hal.transports.session_endpoint import SessionAddress
from mooncake_hal.transports.shm import shm_transport
from mooncake_hal.transports.tcp import tcp_sockets
from mooncake_hal.transports.tcp.native_streams import (
    MAGIC,
    READ,
    REPLY,
    REQUEST,
    WRITE,
    ReplyStatus,
)

KIB = 1024
SECRET = b"conformance"
LOADERS = {
    "shm": "mooncake_hal.transports.shm.shm_transport:load",
    "tcp": "mooncake_hal.transports.tcp.tcp_transport:load",
    "tcp interpreted": "mooncake_hal.transports.tcp.tcp_transport:load_interpreted",
    "adapter": "support.adapter_engine:load",  # also covers rdma: both use the same sessions
}


@dataclass
class Target:
    """An endpoint under attack, with one registered buffer and one unregistered."""

    kit: TransportKit
    endpoint: Endpoint
    registered: Buffer
    secretly: Buffer

    def check(self, before: np.ndarray) -> None:
        """Check that it still serves a well-behaved client, and that no unregistered memory
        changed."""
        assert (self.secretly.get() == before).all()
        near, here = self.kit.open(), self.kit.buffer(64 * KIB)
        near.register(here.region)
        peer = near.connect(self.endpoint.address, timeout=10)
        span = one_span(here.region.address, self.registered.region.address, 64 * KIB)
        peer.read(span, timeout=10).wait()
        assert (here.get() == self.registered.get()).all()
        near.close()


@pytest.fixture
def attack() -> Iterator[Callable[[str], Target]]:
    kits = []

    def begin(name: str) -> Target:
        kit = TransportKit()
        kit.loader = LOADERS[name]
        kit.setup_method()
        kits.append(kit)
        target = Target(kit, kit.open(), kit.buffer(64 * KIB), kit.buffer(64 * KIB))
        target.endpoint.register(target.registered.region)
        return target

    yield begin
    for kit in kits:
        kit.teardown_method()


def dial(target: Target) -> socket.socket:
    """Connect to an endpoint with a raw socket, which allows any misbehaviour."""
    name = target.endpoint.transport
    kind = tcp_sockets.TcpAddress if name == "tcp" else SessionAddress
    there = authentication.decode_address(target.endpoint.address, kind, name)
    if there.port:
        return socket.create_connection((there.host, there.port), 10)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(f"\0{there.host}")
    return connection


def prove(target: Target, connection: socket.socket) -> frames.Seals:
    """Do the handshake as a peer that knows the secret."""
    name = target.endpoint.transport
    versions = {"tcp": tcp_sockets.VERSION, "shm": shm_transport.VERSION}
    version = versions.get(name, adapter_messages.VERSION)
    credentials = authentication.Credentials(SECRET, name, version)
    proven = run_handshake(connection, credentials.connect(None), time.monotonic() + 10)
    connection.settimeout(10)
    return frames.Seals.of_client(proven)


def until_closed(connection: socket.socket) -> bytes:
    """Receive until the peer closes the connection, or sends nothing for a while."""
    found = b""
    connection.settimeout(0.3)
    try:
        while part := connection.recv(65536):
            found += part
    except (TimeoutError, ConnectionResetError):
        pass
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_noise_from_unauthenticated_peers(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before, rng = target.secretly.get(), np.random.default_rng(5)
    for size in (0, 1, 4, 5, 100, 4000, 60000):
        with dial(target) as connection:
            try:
                if size:
                    connection.send(rng.bytes(size))
                    connection.send(b"\xff" * 8)
            except OSError:
                pass  # rejected before everything was sent
    target.check(before)


@pytest.mark.parametrize("name", LOADERS)
def test_silent_connections(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before = target.secretly.get()
    silent = [dial(target) for _ in range(8)]
    target.check(before)
    for connection in silent:
        connection.close()
    target.check(before)


@pytest.mark.parametrize("name", LOADERS)
def test_noise_from_authenticated_peer(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before, rng = target.secretly.get(), np.random.default_rng(6)
    for size in (1, 24, 40, 1000, 50000):
        with dial(target) as connection:
            prove(target, connection)
            connection.send(rng.bytes(size))
            until_closed(connection)
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
def test_frames_with_false_fields(name: str, attack: Callable[[str], Target]) -> None:
    """Well-formed requests of an authenticated peer, with every field at its limits."""
    target = attack(name)
    hidden, before = target.secretly.region, target.secretly.get()
    shown = target.registered.region
    spans = [
        (hidden.address, 64, ReplyStatus.UNKNOWN),
        (0, 64, ReplyStatus.UNKNOWN),
        (2**64 - 1, 1, ReplyStatus.UNKNOWN),
        (2**64 - 8, 64, ReplyStatus.UNKNOWN),
        (shown.address, 2**64 - 1, ReplyStatus.UNKNOWN),
        (shown.address, shown.nbytes + 1, ReplyStatus.OUT_OF_BOUNDS),
        (shown.address + shown.nbytes - 1, 2, ReplyStatus.OUT_OF_BOUNDS),
        (shown.address, 0, ReplyStatus.MALFORMED),
    ]
    for address, nbytes, status in spans:
        with dial(target) as connection:
            prove(target, connection)
            connection.sendall(
                REQUEST.pack(MAGIC, READ, 0, 1, nbytes) + struct.pack("<QQ", address, nbytes)
            )
            magic, found, _ = REPLY.unpack(until_closed(connection)[: REPLY.size])
            assert magic == MAGIC
            refused = {status, ReplyStatus.OUT_OF_BOUNDS} if nbytes > 2**63 else {status}
            assert found in refused, (hex(address), nbytes, found)
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
@pytest.mark.parametrize(
    "request_",
    [
        REQUEST.pack(MAGIC + 1, READ, 0, 1, 8),
        REQUEST.pack(MAGIC, 0, 0, 1, 8),
        REQUEST.pack(MAGIC, 77, 0, 1, 8),
        REQUEST.pack(MAGIC, READ, 0, 0, 8),
        REQUEST.pack(MAGIC, WRITE, 0, 2**63, 8),
        REQUEST.pack(MAGIC, WRITE, 0, (1 << 20) + 1, 8),
        REQUEST.pack(MAGIC, READ, 4, 1, 8) + struct.pack("<10Q", 0, 8, *[1, 0] * 4),
        REQUEST.pack(MAGIC, READ, 1, 1, 8) + struct.pack("<4Q", 0, 8, 0, 8),
        REQUEST.pack(MAGIC, READ, 1, 1, 8) + struct.pack("<4Q", 0, 8, (1 << 20) + 1, 0),
        REQUEST.pack(MAGIC, READ, 3, 1, 8) + struct.pack("<8Q", 0, 8, *[1 << 20, 0] * 3),
    ],
    ids=[
        "magic",
        "operation 0",
        "operation 77",
        "no spans",
        "2^63 spans",
        "too many spans",
        "levels",
        "no times",
        "too many times",
        "2^60 pieces",
    ],
)
def test_malformed_frames(request_: bytes, name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before = target.secretly.get()
    with dial(target) as connection:
        prove(target, connection)
        connection.sendall(request_ + bytes(16))
        assert until_closed(connection) == b""
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
def test_write_with_false_total(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before, content = target.secretly.get(), target.registered.get()
    span = struct.pack("<QQ", target.registered.region.address, 64)
    with dial(target) as connection:
        prove(target, connection)
        connection.sendall(REQUEST.pack(MAGIC, WRITE, 0, 1, 128) + span + b"\xee" * 128)
        _, status, _ = REPLY.unpack(until_closed(connection)[: REPLY.size])
        assert status == ReplyStatus.MALFORMED
    assert (target.registered.get() == content).all()
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
def test_revoke_does_not_wait_for_stalled_peer(name: str, attack: Callable[[str], Target]) -> None:
    """A client that requests much and reads nothing holds the memory no longer than the revoke."""
    target = attack(name)
    large = target.kit.buffer(64 * KIB * KIB)
    key = target.endpoint.register(large.region)
    with dial(target) as connection, dial(target) as writer:
        for stalled, operation in ((connection, READ), (writer, WRITE)):
            prove(target, stalled)
            span = struct.pack("<QQ", large.region.address, large.region.nbytes)
            stalled.sendall(REQUEST.pack(MAGIC, operation, 0, 1, large.region.nbytes) + span)
        writer.sendall(b"\xaa" * 1000)
        time.sleep(0.2)  # both operations are in flight now
        started = time.monotonic()
        target.endpoint.revoke(key)
        assert time.monotonic() - started < 2
        after = large.get()
        writer.sendall(b"\xbb" * 100000)
        time.sleep(0.1)  # bytes that a revoked write still moved would arrive now
        assert (large.get() == after).all()
    target.check(target.secretly.get())


@pytest.mark.parametrize(
    "messages",
    [
        [
            frames.Registered(1, 4096, 64, "cpu", b""),
            frames.Registered(2, 4100, 64, "cpu", b""),
        ],
        [frames.Registered(1, 2**64 - 8, 64, "cpu", b"")],
        [frames.Registered(1, 0, 0, "cpu", b"")],
        [frames.Revoked(7)],
        [frames.SessionRequest(1, b"describe yourself")],
        [frames.SessionResponse(12, b"to what nobody asked")],
        [frames.Ping(2**63)] * 100,
    ],
    ids=["overlap", "beyond", "empty", "unknown", "call", "answer", "pings"],
)
@pytest.mark.parametrize("name", ["shm", "adapter"])
def test_invalid_messages(
    messages: list[frames.AnyMessage], name: str, attack: Callable[[str], Target]
) -> None:
    target = attack(name)
    before = target.secretly.get()
    with dial(target) as connection:
        seals = prove(target, connection)
        for message in messages:
            connection.sendall(seals.outgoing.seal(message))
        until_closed(connection)
    target.check(before)


@pytest.mark.parametrize("name", ["shm", "adapter"])
def test_oversized_frame(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before = target.secretly.get()
    with dial(target) as connection:
        prove(target, connection)
        connection.sendall(b"\xff" * 4)
        connection.settimeout(10)
        while connection.recv(65536):
            pass  # its registered regions were published first
    target.check(before)


@pytest.mark.parametrize("name", ["shm", "adapter"])
@pytest.mark.parametrize("attack_", ["replayed", "reflected", "unsealed"])
def test_unexpected_frames_end_the_session(
    attack_: str, name: str, attack: Callable[[str], Target]
) -> None:
    target = attack(name)
    before = target.secretly.get()
    with dial(target) as connection:
        seals = prove(target, connection)
        ping = seals.outgoing.seal(frames.Ping(1))
        sent = {
            "replayed": ping + ping,
            "reflected": connection.recv(65536),
            "unsealed": frames.frame(authentication.encode(frames.Ping(1))),
        }[attack_]
        connection.sendall(sent)
        connection.settimeout(10)
        while connection.recv(65536):
            # the session ends: it sends no more than the region and the reply to the first ping
            pass
    target.check(before)


def test_unrequested_descriptors_are_closed(attack: Callable[[str], Target]) -> None:
    target = attack("shm")
    before, ours = target.secretly.get(), os.memfd_create("sent to whom did not want it")
    num_open = len(os.listdir("/proc/self/fd"))
    for key in range(1, 65):
        with dial(target) as connection:
            seals = prove(target, connection)
            registered = frames.Registered(key, 4096, 64, "cpu", b"")
            socket.send_fds(connection, [seals.outgoing.seal(registered)], [ours])
            socket.send_fds(connection, [seals.outgoing.seal(frames.Ping(1))], [ours, ours])
            connection.settimeout(10)
            with suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass
    target.check(before)
    assert len(os.listdir("/proc/self/fd")) <= num_open + 8
    os.close(ours)


def test_malformed_responses_raise_typed_errors(attack: Callable[[str], Target]) -> None:
    """The other direction: a client of a fake tcp server that sends nonsense gets typed errors."""
    target = attack("tcp")
    epoch = authentication.fresh_epoch()
    credentials = authentication.Credentials(SECRET, "tcp", tcp_sockets.VERSION)
    near, here = target.kit.open(), target.kit.buffer(64 * KIB)
    near.register(here.region)
    ours = authentication.decode_address(near.address, tcp_sockets.TcpAddress, "tcp")
    for reply in (b"\0" * 16, REPLY.pack(MAGIC, 999, 2**64 - 1), REPLY.pack(MAGIC, 0, 0)[:7], b""):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            address = tcp_sockets.TcpAddress(
                tcp_sockets.VERSION, epoch, "127.0.0.1", port, ours.machine
            )

            def serve(listener: socket.socket = listener, reply: bytes = reply) -> None:
                listener.settimeout(10)
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    run_handshake(connection, credentials.accept(epoch), time.monotonic() + 10)
                    connection.recv(1000)
                    connection.sendall(reply)

            with ThreadPoolExecutor(1) as pool:
                served = pool.submit(serve)
                peer = near.connect(authentication.encode(address), timeout=10)
                with pytest.raises(TransferError):
                    peer.read(one_span(here.region.address, 4096, 64), timeout=10).wait()
                peer.close()
                served.result(10)
