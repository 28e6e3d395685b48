"""Bytes that no peer would send: an endpoint refuses them, serves on, and touches nothing else."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal.testing.transports import TransportKit, one_span
from mooncake_hal.testing.transports_buffers import Buffer
from mooncake_hal.transport import Endpoint
from mooncake_hal.transports import handshake
from mooncake_hal.transports.adapter import facts as adapter_facts
from mooncake_hal.transports.control import messages
from mooncake_hal.transports.shm import control
from mooncake_hal.transports.tcp import wire
from mooncake_hal.transports.tcp.streams import MAGIC, READ, REPLY, REQUEST, WRITE, Status

KIB = 1024
SECRET = b"conformance"
LOADERS = {
    "shm": "mooncake_hal.transports.shm.transport:load",
    "tcp": "mooncake_hal.transports.tcp.transport:load",
    "tcp interpreted": "mooncake_hal.transports.tcp.transport:load_interpreted",
    "adapter": "support.adapter_engine:load",  # and rdma: they have one kind of control connection
}


@dataclass
class Target:
    """An endpoint under attack, with one registered buffer and one that is not."""

    kit: TransportKit
    endpoint: Endpoint
    registered: Buffer
    secretly: Buffer

    def check(self, before: np.ndarray) -> None:
        """Demand that it serves a good client still, and that nothing unregistered changed."""
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
    """Connect to an endpoint below everything that would stop us from misbehaving."""
    if target.endpoint.transport == "shm":
        address = handshake.decode_address(target.endpoint.address, control.Address, "shm")
        connection = control.new_socket(10)
        connection.connect(f"\0{address.socket}")
        return connection
    kind = wire.Address if target.endpoint.transport == "tcp" else messages.ControlAddress
    there = handshake.decode_address(target.endpoint.address, kind, target.endpoint.transport)
    return socket.create_connection((there.host, there.port), 10)


def prove(target: Target, connection: socket.socket) -> None:
    """Shake hands as a member of the deployment."""
    name = target.endpoint.transport
    if name == "shm":
        deployment = handshake.Deployment(SECRET, name, control.VERSION)
        challenge = handshake.decode(control.receive(connection)[0], handshake.Challenge)
        control.send(connection, deployment.answer(challenge, challenge.epoch))
        handshake.decode(control.receive(connection)[0], handshake.Welcome)
        return
    receive, send, version = wire.receive_message, wire.send_message, wire.VERSION
    if name != "tcp":
        receive, send, version = messages.receive, messages.send_frame, adapter_facts.VERSION
    deployment = handshake.Deployment(SECRET, name, version)
    challenge = receive(connection, handshake.Challenge)
    send(connection, deployment.answer(challenge, challenge.epoch))
    assert not receive(connection, handshake.Welcome).refusal


def until_closed(connection: socket.socket) -> bytes:
    """Receive until the other side ends the connection, or has nothing to say for a while."""
    found = b""
    connection.settimeout(0.3)
    try:
        while part := connection.recv(65536):
            found += part
    except (TimeoutError, ConnectionResetError):
        pass
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_strangers_who_send_noise(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before, rng = target.secretly.get(), np.random.default_rng(5)
    for size in (0, 1, 4, 5, 100, 4000, 60000):
        with dial(target) as connection:
            try:
                if size:
                    connection.send(rng.bytes(size))
                    connection.send(b"\xff" * 8)
            except OSError:
                pass  # refused before we were done
    target.check(before)


@pytest.mark.parametrize("name", LOADERS)
def test_strangers_who_say_nothing(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before = target.secretly.get()
    silent = [dial(target) for _ in range(8)]
    target.check(before)
    for connection in silent:
        connection.close()
    target.check(before)


@pytest.mark.parametrize("name", LOADERS)
def test_a_member_who_sends_noise(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before, rng = target.secretly.get(), np.random.default_rng(6)
    for size in (1, 24, 40, 1000, 50000):
        with dial(target) as connection:
            prove(target, connection)
            connection.send(rng.bytes(size))
            until_closed(connection)
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
def test_frames_that_lie(name: str, attack: Callable[[str], Target]) -> None:
    """Well-formed requests of a member, with every field driven to its edges."""
    target = attack(name)
    hidden, before = target.secretly.region, target.secretly.get()
    shown = target.registered.region
    spans = [
        (hidden.address, 64, Status.UNKNOWN),
        (0, 64, Status.UNKNOWN),
        (2**64 - 1, 1, Status.UNKNOWN),
        (2**64 - 8, 64, Status.UNKNOWN),
        (shown.address, 2**64 - 1, Status.UNKNOWN),
        (shown.address, shown.nbytes + 1, Status.OUT_OF_BOUNDS),
        (shown.address + shown.nbytes - 1, 2, Status.OUT_OF_BOUNDS),
        (shown.address, 0, Status.MALFORMED),
    ]
    for address, nbytes, status in spans:
        with dial(target) as connection:
            prove(target, connection)
            connection.sendall(
                REQUEST.pack(MAGIC, READ, 1, nbytes) + struct.pack("<QQ", address, nbytes)
            )
            magic, found, _ = REPLY.unpack(until_closed(connection)[: REPLY.size])
            assert magic == MAGIC
            refused = {status, Status.OUT_OF_BOUNDS} if nbytes > 2**63 else {status}
            assert found in refused, (hex(address), nbytes, found)
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
@pytest.mark.parametrize(
    "request_",
    [
        REQUEST.pack(MAGIC + 1, READ, 1, 8),
        REQUEST.pack(MAGIC, 0, 1, 8),
        REQUEST.pack(MAGIC, 77, 1, 8),
        REQUEST.pack(MAGIC, READ, 0, 8),
        REQUEST.pack(MAGIC, WRITE, 2**63, 8),
        REQUEST.pack(MAGIC, WRITE, (1 << 20) + 1, 8),
    ],
    ids=["magic", "operation 0", "operation 77", "no spans", "2^63 spans", "too many spans"],
)
def test_frames_that_are_none(request_: bytes, name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before = target.secretly.get()
    with dial(target) as connection:
        prove(target, connection)
        connection.sendall(request_ + bytes(16))
        assert until_closed(connection) == b""
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
def test_a_write_whose_total_lies(name: str, attack: Callable[[str], Target]) -> None:
    target = attack(name)
    before, content = target.secretly.get(), target.registered.get()
    span = struct.pack("<QQ", target.registered.region.address, 64)
    with dial(target) as connection:
        prove(target, connection)
        connection.sendall(REQUEST.pack(MAGIC, WRITE, 1, 128) + span + b"\xee" * 128)
        _, status, _ = REPLY.unpack(until_closed(connection)[: REPLY.size])
        assert status == Status.MALFORMED
    assert (target.registered.get() == content).all()
    target.check(before)


@pytest.mark.parametrize("name", ["tcp", "tcp interpreted"])
def test_revoking_does_not_wait_for_a_member_who_stalls(
    name: str, attack: Callable[[str], Target]
) -> None:
    """A client that asks for much and reads nothing holds the memory no longer than revoke."""
    target = attack(name)
    large = target.kit.buffer(64 * KIB * KIB)
    key = target.endpoint.register(large.region)
    with dial(target) as connection, dial(target) as writer:
        for stalled, operation in ((connection, READ), (writer, WRITE)):
            prove(target, stalled)
            span = struct.pack("<QQ", large.region.address, large.region.nbytes)
            stalled.sendall(REQUEST.pack(MAGIC, operation, 1, large.region.nbytes) + span)
        writer.sendall(b"\xaa" * 1000)
        time.sleep(0.2)  # both operations are under way now
        started = time.monotonic()
        target.endpoint.revoke(key)
        assert time.monotonic() - started < 2
        after = large.get()
        writer.sendall(b"\xbb" * 100000)
        time.sleep(0.1)  # what a revoked write still moved would arrive now
        assert (large.get() == after).all()
    target.check(target.secretly.get())


def test_shm_messages_that_make_no_sense(attack: Callable[[str], Target]) -> None:
    target = attack("shm")
    before = target.secretly.get()
    for message in (
        control.Revoked(999),
        control.Sync(5),
        control.Offer(1, target.secretly.region.address, 4096),
        control.Revoke(1),
    ):
        with dial(target) as connection:
            prove(target, connection)
            control.send(connection, message)
            until_closed(connection)
    target.check(before)


@pytest.mark.parametrize(
    "frames",
    [
        [
            messages.Registered(1, 4096, 64, "cpu", b""),
            messages.Registered(2, 4100, 64, "cpu", b""),
        ],
        [messages.Registered(1, 2**64 - 8, 64, "cpu", b"")],
        [messages.Registered(1, 0, 0, "cpu", b"")],
        [messages.Revoked(7)],
        [messages.Call(1, b"describe yourself")],
        [messages.Answer(12, b"to what nobody asked")],
        [messages.Ping(2**63)] * 100,
    ],
    ids=["overlap", "beyond", "empty", "unknown", "call", "answer", "pings"],
)
def test_control_messages_that_make_no_sense(
    frames: list[messages.AnyMessage], attack: Callable[[str], Target]
) -> None:
    target = attack("adapter")
    before = target.secretly.get()
    with dial(target) as connection:
        prove(target, connection)
        for frame in frames:
            messages.send_frame(connection, frame)
        until_closed(connection)
    target.check(before)


def test_a_control_frame_too_long_to_be_one(attack: Callable[[str], Target]) -> None:
    target = attack("adapter")
    before = target.secretly.get()
    with dial(target) as connection:
        prove(target, connection)
        connection.sendall(b"\xff" * 4)
        connection.settimeout(10)
        while connection.recv(65536):
            pass  # what it has registered was told first
    target.check(before)


def test_a_server_that_lies_to_its_client(attack: Callable[[str], Target]) -> None:
    """The other direction: a fake tcp server that answers nonsense gets typed errors."""
    target = attack("tcp")
    epoch = handshake.fresh_epoch()
    deployment = handshake.Deployment(SECRET, "tcp", wire.VERSION)
    near, here = target.kit.open(), target.kit.buffer(64 * KIB)
    near.register(here.region)
    ours = handshake.decode_address(near.address, wire.Address, "tcp")
    for reply in (b"\0" * 16, REPLY.pack(MAGIC, 999, 2**64 - 1), REPLY.pack(MAGIC, 0, 0)[:7], b""):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            address = wire.Address(wire.VERSION, epoch, "127.0.0.1", port, ours.machine)

            def serve(listener: socket.socket = listener, reply: bytes = reply) -> None:
                listener.settimeout(10)
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    challenge = deployment.challenge(epoch)
                    wire.send_message(connection, challenge)
                    hello = wire.receive_message(connection, handshake.Hello)
                    wire.send_message(connection, deployment.check_client(challenge, hello))
                    connection.recv(1000)
                    connection.sendall(reply)

            with ThreadPoolExecutor(1) as pool:
                served = pool.submit(serve)
                peer = near.connect(handshake.encode(address), timeout=10)
                with pytest.raises(TransferError):
                    peer.read(one_span(here.region.address, 4096, 64), timeout=10).wait()
                peer.close()
                served.result(10)
