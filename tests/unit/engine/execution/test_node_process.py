"""A node that joins: its messages, its exit, and its errors."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.node_connections import (
    AuthenticatedListener,
    InstanceOver,
    NodeHello,
    NodeReady,
    NodeRefused,
    NodeWelcome,
    connect_authenticated,
    receive_message,
    send_message,
)
from mooncake_engine.execution.node_process import run_node
from mooncake_engine.node_config import NodeConfig

SECRET = "of these tests"
TIMEOUT_S = 60
# How node 0 answers the hello of a node.
Answer = Callable[[Connection, NodeHello], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def join(checkpoint: Path, listening: socket.socket, answer: Answer, secret: str = SECRET) -> None:
    """Run a node until it exits, with a node 0 that replies by ``answer``."""
    address = listening.getsockname()
    listener = AuthenticatedListener(listening, secret.encode())
    nodes = NodeConfig(nnodes=2, node_rank=1, master_port=address[1], secret=SECRET)
    config = EngineConfig(checkpoint, tp_size=2, nodes=nodes, threads=1)

    def node_0() -> None:
        with listener.accept(TIMEOUT_S) as connection:
            hello = receive_message(connection, TIMEOUT_S)
            assert isinstance(hello, NodeHello)
            answer(connection, hello)

    with closing(listener), ThreadPoolExecutor(1) as threads:
        answering = threads.submit(node_0)
        try:
            run_node(config, 0.0)
        finally:
            if secret == SECRET:
                answering.result(TIMEOUT_S)
            else:  # node 0 waits for the next node
                connect_authenticated(address, secret.encode()).close()
                assert isinstance(answering.exception(TIMEOUT_S), EOFError)


def test_node_joins_and_exits_with_the_instance(checkpoint: Path, listening: socket.socket) -> None:
    hellos: list[NodeHello] = []

    def answer(connection: Connection, hello: NodeHello) -> None:
        hellos.append(hello)
        send_message(connection, NodeWelcome("token", (), 2))
        ready = receive_message(connection, TIMEOUT_S)
        assert isinstance(ready, NodeReady)
        assert len(set(ready.ports)) == 2
        assert Path(hello.scratch).is_dir()
        send_message(connection, InstanceOver())

    join(checkpoint, listening, answer)
    [hello] = hellos
    assert (hello.node, hello.num_nodes, hello.num_ranks) == (1, 2, 2)
    assert (hello.host, hello.model) == ("127.0.0.1", str(checkpoint.resolve()))
    assert not Path(hello.scratch).exists()


def test_rejection_is_reported_with_its_reason(checkpoint: Path, listening: socket.socket) -> None:
    def refuse(connection: Connection, _: NodeHello) -> None:
        send_message(connection, NodeRefused("copies of the model differ"))

    with pytest.raises(ConfigError, match="rejected this node: copies of the model differ"):
        join(checkpoint, listening, refuse)


def test_node_exits_when_node_0_is_gone(checkpoint: Path, listening: socket.socket) -> None:
    def leave(connection: Connection, _: NodeHello) -> None:
        send_message(connection, NodeWelcome("token", (), 0))

    with pytest.raises(EngineDead, match=r"node 0 at 127.0.0.1:\d+ is gone"):
        join(checkpoint, listening, leave)


def test_node_exits_on_a_signal(checkpoint: Path, listening: socket.socket) -> None:
    def stop(connection: Connection, _: NodeHello) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(EOFError):
            receive_message(connection, TIMEOUT_S)

    join(checkpoint, listening, stop)


def test_different_secrets_are_reported(checkpoint: Path, listening: socket.socket) -> None:
    with pytest.raises(ConfigError, match="give both the same --node-secret-file"):
        join(checkpoint, listening, lambda *_: None, "another one")
