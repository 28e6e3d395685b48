"""A network may deliver bytes of a write that has failed: why ``tcp`` does not abort its writes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec
import numpy as np
import pytest

from mooncake_hal.errors import TransferTimeout
from mooncake_hal.session.listener import hang_up
from mooncake_hal.testing.transports import MIB, one_span
from mooncake_hal.testing.transports_buffers import anonymous
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports.tcp.tcp_sockets import TcpAddress
from mooncake_hal.transports.tcp.tcp_transport import load

NBYTES = 64 * MIB
HELD_FROM = MIB
"""Bytes of a connection that a stalled network has delivered."""


class HoldingNetwork:
    """Forwards connections to a port; holds all bytes after HELD_FROM until ``may_continue``."""

    def __init__(self, port: int) -> None:
        self.may_continue = threading.Event()
        self.was_reset = threading.Event()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends = [self._listener]
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def close(self) -> None:
        self.may_continue.set()
        for end in self._ends:
            hang_up(end)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()

    def _begin(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                writer, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [writer, server]
                self._begin(self._carry, writer, server, HELD_FROM)
                self._begin(self._carry, server, writer, 2**62)

    def _carry(self, source: socket.socket, target: socket.socket, held_from: int) -> None:
        with suppress(OSError):
            while data := self._received(source):
                held_from -= len(data)
                if held_from < 0:
                    self.may_continue.wait(60)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _received(self, source: socket.socket) -> bytes:
        try:
            return source.recv(65536)
        except ConnectionResetError:
            self.was_reset.set()
            return b""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_bytes_of_a_failed_write_arrive_after_its_connection_is_closed(stack: ExitStack) -> None:
    transport = load()
    far, near = (transport.open(EndpointOptions(secret=b"late")) for _ in range(2))
    there, here = anonymous(NBYTES), anonymous(NBYTES)
    for each in (there, here, far, near):
        stack.callback(each.close)
    here.put(np.full(NBYTES, 7, np.uint8))
    far.register(there.region)
    near.register(here.region)
    address = msgspec.msgpack.decode(far.address, type=TcpAddress)
    network = HoldingNetwork(address.port)
    stack.callback(network.close)
    behind = msgspec.msgpack.encode(msgspec.structs.replace(address, port=network.port))
    peer = near.connect(behind, timeout=5)
    spans = one_span(here.region.address, there.region.address, NBYTES)
    with pytest.raises(TransferTimeout, match="drained"):
        peer.write(spans, timeout=0.3).wait()
    peer.close()
    there.put(np.full(NBYTES, 3, np.uint8))  # memory that belongs to another request by now
    network.may_continue.set()
    deadline = time.monotonic() + 10
    while (there.get() == 3).all():
        assert time.monotonic() < deadline, "nothing arrived: stops_writes_on_failure could be True"
        time.sleep(0.01)
    assert not transport.stops_writes_on_failure
    assert network.was_reset.wait(10), "the kernel went on to send what it had"
