"""What no peer would say: an endpoint refuses it, and serves on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from msgspec.structs import replace

from mooncake_hal.errors import TransferError
from mooncake_hal.testing.transports import MIB, Pair, TransportKit
from mooncake_hal.testing.transports_buffers import random_pieces
from mooncake_hal.transports.control.endpoint import read_address
from mooncake_hal.transports.control.listener import dial
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.handshake import Deployment, encode
from mooncake_hal.transports.rdma.driver import MAX_LANES, NAME
from mooncake_hal.transports.rdma.facts import VERSION, LaneFacts, OpenLanes, ReopenLane

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LANE = LaneFacts(0, "::ffff:10.9.0.1", 0, 77, 1, 3, 16)
NOISE_BYTES = (1, 4, 5, 100, 4000, 60000)


class TestFuzz(TransportKit):
    """Against an endpoint that has a peer already."""

    loader = "mooncake_hal.transports.rdma.plugin:load"
    timeout = 60.0

    def test_strangers_who_send_noise(self) -> None:
        pair = self.pair()
        for size in NOISE_BYTES:
            address = read_address(pair.far.address, NAME, VERSION)
            with socket.create_connection((address.host, address.port), 10) as connection:
                connection.sendall(self.rng.bytes(size))
        self.check_serves(pair)

    def test_members_who_send_noise(self) -> None:
        pair = self.pair()
        for size in NOISE_BYTES:
            with self.member(pair) as connection:
                connection.sendall(self.rng.bytes(size))
        self.check_serves(pair)

    def test_members_whose_calls_make_no_sense(self) -> None:
        pair = self.pair()
        calls = [
            (OpenLanes([], []), "1 to 256"),
            (OpenLanes([0] * (MAX_LANES + 1), [LANE] * (MAX_LANES + 1)), "1 to 256"),
            (OpenLanes([0], [LANE, LANE]), "need as many rails"),
            (OpenLanes([99], [LANE]), "no rail 99"),
            (OpenLanes([-1], [LANE]), "no rail -1"),
            (ReopenLane(0, LANE), "no lane 0"),
            (ReopenLane(-1, LANE), "no lane -1"),
        ]
        for call, reason in calls:
            with self.session(pair) as session, pytest.raises(TransferError, match=reason):
                session.call(encode(call), 10.0)
        self.check_serves(pair)

    def test_members_who_name_ends_that_are_not_there(self) -> None:
        pair = self.pair()
        ends = [replace(LANE, gid="2001:db8::1"), replace(LANE, mtu=255, reads=255)]
        for lane in ends:
            with self.session(pair) as session, suppress(TransferError):
                session.call(encode(OpenLanes([0], [lane])), 10.0)
        self.check_serves(pair)

    @contextmanager
    def session(self, pair: Pair) -> Iterator[Session]:
        """A control connection of a member."""
        session = Session(self.member(pair), _answer_nothing)
        session.start("fuzz")
        try:
            yield session
        finally:
            session.close()

    def member(self, pair: Pair) -> socket.socket:
        """Connect to the far endpoint as one that knows the secret."""
        address = read_address(pair.far.address, NAME, VERSION)
        deployment = Deployment(self.options().secret, NAME, VERSION)
        return dial(address.host, address.port, deployment, address.epoch, 10.0)

    def check_serves(self, pair: Pair) -> None:
        """The old peer and a new one move bytes as ever."""
        pieces = random_pieces(self.rng, np.full(8, 1024, np.int64), MIB)
        self.check_moves(pair, pieces)
        pair.peer = pair.near.connect(pair.far.address, timeout=self.timeout)
        self.check_moves(pair, pieces)


def _answer_nothing(session: Session, payload: bytes) -> bytes:
    raise TransferError("this one answers nothing")
