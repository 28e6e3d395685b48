"""The listen and advertised addresses of transports of a rank on another Ray host."""

from __future__ import annotations

import socket
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path

import pytest

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.node_connections import (
    AuthenticatedListener,
    RankHello,
    connect_authenticated,
    send_message,
)
from mooncake_engine.execution.ray_launcher import RankLocation, RayRank, accept_rank
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


def test_connections_of_a_rank_are_told_apart() -> None:
    """They may be authenticated in either order."""
    key = b"0123456789abcdef0123456789abcdef"
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    with closing(AuthenticatedListener(listening, key)) as listener:
        messages, orders = (connect_authenticated(address, key) for _ in range(2))
        send_message(messages, RankHello("", 3, False))
        send_message(orders, RankHello("", 3, True))
        ours = accept_rank(listener, 3, RankLocation(THEIRS, OURS, 7))
    with messages, orders, ours[0], ours[1]:
        orders.send("done")
        messages.send("emitted")
        assert [end.recv() for end in ours] == ["done", "emitted"]
