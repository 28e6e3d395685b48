"""Malformed messages to an rdma endpoint, which must reject them and continue serving."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from msgspec.structs import replace

from mooncake_hal.errors import TransferError
from mooncake_hal.session.authentication import Credentials, encode
from mooncake_hal.session.listener import ProvenSocket, dial
from mooncake_hal.session.session import Session, reject_requests
from mooncake_hal.testing.transports import MIB, Pair, TransportKit
from mooncake_hal.testing.transports_buffers import random_pieces
from mooncake_hal.transports.rdma.rdma_endpoint import MAX_QUEUE_PAIRS, NAME
from mooncake_hal.transports.rdma.rdma_messages import (
    VERSION,
    OpenQueuePairs,
    QueuePairInfo,
    ReopenQueuePair,
)
from mooncake_hal.transports.session_endpoint import read_address

QUEUE_PAIR = QueuePairInfo(0, "::ffff:10.9.0.1", 0, 77, 1, 3, 16)
NOISE_BYTES = (1, 4, 5, 100, 4000, 60000)


class RdmaFuzz(TransportKit):
    """The cases, against an endpoint that already has a peer."""

    loader = "mooncake_hal.transports.rdma.rdma_plugin:load"
    timeout = 60.0

    def test_noise_from_unauthenticated_peers(self) -> None:
        pair = self.pair()
        for size in NOISE_BYTES:
            address = read_address(pair.far.address, NAME, VERSION)
            with socket.create_connection((address.host, address.port), 10) as connection:
                connection.sendall(self.rng.bytes(size))
        self.check_serves(pair)

    def test_noise_from_members(self) -> None:
        pair = self.pair()
        for size in NOISE_BYTES:
            with self.member(pair).sock as connection:
                connection.sendall(self.rng.bytes(size))
        self.check_serves(pair)

    def test_invalid_calls_from_members(self) -> None:
        pair = self.pair()
        calls = [
            (OpenQueuePairs([], []), "1 to 256"),
            (
                OpenQueuePairs([0] * (MAX_QUEUE_PAIRS + 1), [QUEUE_PAIR] * (MAX_QUEUE_PAIRS + 1)),
                "1 to 256",
            ),
            (OpenQueuePairs([0], [QUEUE_PAIR, QUEUE_PAIR]), "need as many NICs"),
            (OpenQueuePairs([99], [QUEUE_PAIR]), "no NIC 99"),
            (OpenQueuePairs([-1], [QUEUE_PAIR]), "no NIC -1"),
            (ReopenQueuePair(0, QUEUE_PAIR), "no connection 0"),
            (ReopenQueuePair(-1, QUEUE_PAIR), "no connection -1"),
        ]
        for call, reason in calls:
            with self.session(pair) as session, pytest.raises(TransferError, match=reason):
                session.request(encode(call), 10.0)
        self.check_serves(pair)

    def test_invalid_queue_pairs_from_members(self) -> None:
        pair = self.pair()
        ends = [replace(QUEUE_PAIR, gid="2001:db8::1"), replace(QUEUE_PAIR, mtu=255, reads=255)]
        for queue_pair in ends:
            with self.session(pair) as session, suppress(TransferError):
                session.request(encode(OpenQueuePairs([0], [queue_pair])), 10.0)
        self.check_serves(pair)

    @contextmanager
    def session(self, pair: Pair) -> Iterator[Session]:
        """An authenticated session."""
        session = Session(self.member(pair), reject_requests)
        session.start("fuzz")
        try:
            yield session
        finally:
            session.close()

    def member(self, pair: Pair) -> ProvenSocket:
        """Connect to the far endpoint with the secret."""
        address = read_address(pair.far.address, NAME, VERSION)
        credentials = Credentials(self.options().secret, NAME, VERSION)
        where = (address.host, address.port)

        def open_socket(timeout: float) -> socket.socket:
            return socket.create_connection(where, timeout)

        return dial(open_socket, str(where), credentials, address.epoch, 10.0)

    def check_serves(self, pair: Pair) -> None:
        """Check that the existing peer and a new one still transfer bytes."""
        pieces = random_pieces(self.rng, np.full(8, 1024, np.int64), MIB)
        self.check_moves(pair, pieces)
        pair.peer = pair.near.connect(pair.far.address, timeout=self.timeout)
        self.check_moves(pair, pieces)
