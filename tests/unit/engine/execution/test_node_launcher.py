"""Which nodes may join an instance, and how failures are reported."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.config import EngineConfig, ExecutorKind
from mooncake_engine.errors import ConfigError, EngineDead, PortInUse
from mooncake_engine.execution import node_launcher
from mooncake_engine.execution.node_connections import (
    InstanceOver,
    NodeHello,
    NodeRefused,
    NodeWelcome,
    RankHello,
    connect_authenticated,
    receive_message,
    send_message,
)
from mooncake_engine.execution.node_launcher import (
    NodeLauncher,
    engine_version,
    weights_fingerprint,
)
from mooncake_engine.node_config import NodeConfig, read_node_secret
from mooncake_hal.testing.backends import free_port

SECRET = "of the nodes in these tests"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def config(checkpoint: Path) -> EngineConfig:
    nodes = NodeConfig(nnodes=2, master_port=free_port(), secret=SECRET)
    return EngineConfig(checkpoint, tp_size=2, nodes=nodes, threads=1)


class Starting:
    """Node 0, which waits for the other nodes in a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self.launcher = NodeLauncher(config)
        self.address = (config.nodes.master_addr, config.nodes.master_port)
        self._threads = ThreadPoolExecutor(1)
        self.ranks: Future[object] = self._threads.submit(self.launcher.start)

    def close(self) -> None:
        self.ranks.exception(TIMEOUT_S)
        self.launcher.close()
        self._threads.shutdown()


@pytest.fixture
def starting(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    monkeypatch.setattr(node_launcher, "_START_TIMEOUT_S", 0.2)  # nodes start no ranks here
    node_0 = Starting(config)
    yield node_0
    node_0.close()


@pytest.fixture
def hello(config: EngineConfig) -> NodeHello:
    return NodeHello(
        node=1,
        num_nodes=2,
        num_ranks=2,
        version=engine_version(),
        weights=weights_fingerprint(config.model),
        model=str(config.model),
        draft_model="",
        host="127.0.0.1",
        scratch="/nowhere",
    )


def join(starting: Starting, hello: NodeHello) -> Connection:
    connection = connect_authenticated(starting.address, SECRET.encode())
    send_message(connection, hello)
    return connection


def test_node_with_another_secret_is_rejected(starting: Starting, hello: NodeHello) -> None:
    with pytest.raises(AuthenticationError):
        connect_authenticated(starting.address, b"a guess")
    with join(starting, hello) as connection:
        assert isinstance(receive_message(connection, TIMEOUT_S), NodeWelcome)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.0"}, "versions of mooncake-engine differ: .* on node 0, 0.0 on node 1"),
        ({"num_nodes": 3}, "values of --nnodes differ: 2 on node 0, 3 on node 1"),
        ({"num_ranks": 4}, "numbers of ranks differ: 2 on node 0, 4 on node 1"),
        ({"weights": "others"}, "copies of the model differ: .* on node 0, others on node 1"),
        ({"node": 2}, "--node-rank must be from 1 to 1, got 2"),
    ],
)
def test_rejected_node_receives_the_reason_and_the_next_is_accepted(
    starting: Starting, hello: NodeHello, change: dict[str, object], reason: str
) -> None:
    with join(starting, msgspec.structs.replace(hello, **change)) as outsider:
        refusal = receive_message(outsider, TIMEOUT_S)
    assert isinstance(refusal, NodeRefused)
    assert re.fullmatch(reason, refusal.reason)
    with join(starting, hello) as connection:
        welcome = receive_message(connection, TIMEOUT_S)
    assert isinstance(welcome, NodeWelcome)
    assert (welcome.ranks, welcome.num_ports) == ((1,), 0)  # ranks meet at the first one's host


def test_node_that_disconnects_during_startup_ends_the_instance(
    starting: Starting, hello: NodeHello
) -> None:
    with join(starting, hello) as connection:
        assert isinstance(receive_message(connection, TIMEOUT_S), NodeWelcome)
    with pytest.raises(EngineDead, match="ranks of the other nodes did not connect within"):
        starting.ranks.result(TIMEOUT_S)


def test_connections_of_no_rank_do_not_prolong_the_wait_for_ranks(
    starting: Starting, hello: NodeHello
) -> None:
    """As of a node that was started for an earlier instance with the same secret."""
    with join(starting, hello) as connection:
        assert isinstance(receive_message(connection, TIMEOUT_S), NodeWelcome)
        deadline = time.monotonic() + TIMEOUT_S / 10
        while not starting.ranks.done() and time.monotonic() < deadline:
            with suppress(OSError, EOFError):
                stranger = connect_authenticated(starting.address, SECRET.encode())
                with stranger:
                    send_message(stranger, RankHello("of another instance", 1, True))
        assert starting.ranks.done()
    with pytest.raises(EngineDead, match="ranks of the other nodes did not connect within"):
        starting.ranks.result(TIMEOUT_S)


def test_other_nodes_are_notified_when_the_instance_ends(
    starting: Starting, hello: NodeHello
) -> None:
    with join(starting, hello) as connection:
        assert isinstance(receive_message(connection, TIMEOUT_S), NodeWelcome)
        starting.close()
        assert isinstance(receive_message(connection, TIMEOUT_S), InstanceOver)


def test_missing_node_is_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_launcher, "JOIN_TIMEOUT_S", 0.2)
    launcher = NodeLauncher(config)
    try:
        with pytest.raises(ConfigError, match=r"node 1 of 2 did not join at 127.0.0.1:\d+ within"):
            launcher.start()
    finally:
        launcher.close()


def test_port_in_use_is_named(config: EngineConfig) -> None:
    launcher = NodeLauncher(config)
    try:
        with pytest.raises(PortInUse, match="choose another --master-port on every node"):
            NodeLauncher(config)
    finally:
        launcher.close()


def test_invalid_master_address_is_named(config: EngineConfig) -> None:
    nodes = replace(config.nodes, master_addr="x" * 64)
    with pytest.raises(ConfigError, match=r"--master-addr x{64} is not an address"):
        NodeLauncher(replace(config, nodes=nodes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "--nnodes 2 needs --node-secret-file"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank must be from 0 to 1 with --nnodes 2, got 2"),
        ({"node_rank": 1}, "--node-rank must be from 0 to 0 with --nnodes 1, got 1"),
        ({"nnodes": 2, "master_port": 0}, "--master-port must be from 1 to 65535, got 0"),
    ],
)
def test_contradictory_node_options_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NodeConfig(**options)  # type: ignore[arg-type]  # no option here is the secret


def test_options_incompatible_with_several_nodes_are_rejected(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--nnodes 2 was requested with 3 ranks"):
        replace(config, tp_size=3)
    with pytest.raises(ConfigError, match="--nnodes 2 was requested with --executor ray"):
        replace(config, executor=ExecutorKind.RAY)


def test_node_secret_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="can't read --node-secret-file"):
        read_node_secret(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_node_secret(file)
    file.write_text(f"{SECRET}\n")
    assert read_node_secret(file) == SECRET
