"""The listen and advertised addresses of transports of a rank on another Ray host."""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution import node_connections
from mooncake_engine.execution.ray_launcher import RankLocation, RayRank
from mooncake_hal.port_range import PortRange
from mooncake_kv.config import KVTransferConfig

OURS, THEIRS = "10.0.0.1", "10.0.0.2"
PORTS = PortRange(21_000, 21_009)


def adapted(host: str, advertised_host: str, rank_host: str = THEIRS) -> KVTransferConfig:
    orders, messages = Pipe()
    with orders, messages:
        rank = RayRank(1, (orders, messages), None, None, RankLocation(rank_host, OURS, 7))
        kv = KVTransferConfig(host=host, advertise_host=advertised_host, port_range=PORTS)
        config = rank.adapt(EngineConfig(Path("m"), role=Role.DECODE, kv_transfer=kv))
    assert config.kv_transfer is not None
    assert config.kv_transfer.port_range == PORTS
    return config.kv_transfer


@pytest.mark.parametrize(
    ("host", "advertised_host", "expected"),
    [
        (OURS, OURS, (THEIRS, THEIRS)),
        ("0.0.0.0", "192.0.2.9", ("0.0.0.0", THEIRS)),
        (OURS, "192.0.2.9", (THEIRS, THEIRS)),
    ],
)
def test_rank_on_another_host_uses_that_hosts_address(
    host: str, advertised_host: str, expected: tuple[str, str]
) -> None:
    kv = adapted(host, advertised_host)
    assert (kv.host, kv.advertise_host) == expected


def test_rank_on_our_host_keeps_the_configured_addresses() -> None:
    kv = adapted("0.0.0.0", "192.0.2.9", rank_host=OURS)
    assert (kv.host, kv.advertise_host) == ("0.0.0.0", "192.0.2.9")


def test_loopback_for_a_rank_on_another_host_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 is on 10.0.0.2, where peers can't reach"):
        adapted("127.0.0.1", "127.0.0.1")


KEY = b"0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("drips", [False, True])
def test_silent_or_slow_connection_does_not_block_ranks(
    drips: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_connections, "_AUTH_TIMEOUT_S", 0.3)
    is_over = threading.Event()

    def drip(outsider: socket.socket) -> None:
        length, byte = (100).to_bytes(4, "big"), b"x"
        for piece in [length, *[byte] * 90]:
            if is_over.wait(0.05):
                return
            try:
                outsider.sendall(piece)
            except OSError:
                return

    with (
        caplog.at_level(logging.WARNING),
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as outsider,
        ThreadPoolExecutor(2) as threads,
    ):
        if drips:
            threads.submit(drip, outsider)
        connecting = threads.submit(Client, listener.getsockname(), authkey=KEY)
        ours: Connection = node_connections.accept_authenticated(listener, KEY)
        is_over.set()
        with ours, connecting.result(60) as theirs:
            theirs.send("a rank")
            assert ours.poll(60)
            assert ours.recv() == "a rank"
    assert "that is not authenticated" in caplog.text
