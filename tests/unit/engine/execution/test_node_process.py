"""A node that joins: its messages, its exit, and its errors."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.node_connections import (
    InstanceOver,
    NodeHello,
    NodeReady,
    NodeRefused,
    NodeWelcome,
    accept_authenticated,
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
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        yield server


def join(checkpoint: Path, listener: socket.socket, answer: Answer, secret: str = SECRET) -> None:
    """Run a node until it exits, with a node 0 that replies by ``answer``."""
    nodes = NodeConfig(nnodes=2, node_rank=1, master_port=listener.getsockname()[1], secret=SECRET)
    config = EngineConfig(checkpoint, tp_size=2, nodes=nodes, threads=1)

    def node_0() -> None:
        with accept_authenticated(listener, secret.encode()) as connection:
            hello = receive_message(connection, TIMEOUT_S)
            assert isinstance(hello, NodeHello)
            answer(connection, hello)

    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(node_0)
        try:
            run_node(config, 0.0)
        finally:
            if secret == SECRET:
                answering.result(TIMEOUT_S)
            else:  # node 0 waits for the next node
                connect_authenticated(listener.getsockname(), secret.encode()).close()
                assert isinstance(answering.exception(TIMEOUT_S), EOFError)


def test_node_joins_and_exits_with_the_instance(checkpoint: Path, listener: socket.socket) -> None:
    hellos: list[NodeHello] = []

    def answer(connection: Connection, hello: NodeHello) -> None:
        hellos.append(hello)
        send_message(connection, NodeWelcome("token", (), 2))
        ready = receive_message(connection, TIMEOUT_S)
        assert isinstance(ready, NodeReady)
        assert len(set(ready.ports)) == 2
        assert Path(hello.scratch).is_dir()
        send_message(connection, InstanceOver())

    join(checkpoint, listener, answer)
    [hello] = hellos
    assert (hello.node, hello.num_nodes, hello.num_ranks) == (1, 2, 2)
    assert (hello.host, hello.model) == ("127.0.0.1", str(checkpoint.resolve()))
    assert not Path(hello.scratch).exists()


def test_rejection_is_reported_with_its_reason(checkpoint: Path, listener: socket.socket) -> None:
    def refuse(connection: Connection, _: NodeHello) -> None:
        send_message(connection, NodeRefused("copies of the model differ"))

    with pytest.raises(ConfigError, match="rejected this node: copies of the model differ"):
        join(checkpoint, listener, refuse)


def test_node_exits_when_node_0_is_gone(checkpoint: Path, listener: socket.socket) -> None:
    def leave(connection: Connection, _: NodeHello) -> None:
        send_message(connection, NodeWelcome("token", (), 0))

    with pytest.raises(EngineDead, match=r"node 0 at 127.0.0.1:\d+ is gone"):
        join(checkpoint, listener, leave)


def test_node_exits_on_a_signal(checkpoint: Path, listener: socket.socket) -> None:
    def stop(connection: Connection, _: NodeHello) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(EOFError):
            receive_message(connection, TIMEOUT_S)

    join(checkpoint, listener, stop)


def test_different_secrets_are_reported(checkpoint: Path, listener: socket.socket) -> None:
    with pytest.raises(ConfigError, match="give both the same --node-secret-file"):
        join(checkpoint, listener, lambda *_: None, "another one")


class StandInListener:
    """A peer that leaves at once, and then nobody."""

    def __init__(self, limit_s: float) -> None:
        self.limits_s = [limit_s]

    def gettimeout(self) -> float:
        return self.limits_s[-1]

    def settimeout(self, limit_s: float) -> None:
        self.limits_s.append(limit_s)

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if len(self.limits_s) > 2:
            raise TimeoutError
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours, ("10.0.0.2", 1)


def test_rejected_connection_does_not_restart_the_wait() -> None:
    listener = StandInListener(10.0)
    with pytest.raises(TimeoutError):
        accept_authenticated(listener, SECRET.encode())  # type: ignore[arg-type]
    first, second = listener.limits_s[1:-1]
    assert 0 < second < first <= 10.0
    assert listener.gettimeout() == 10.0


@pytest.mark.timeout(30)
def test_rejected_connections_do_not_extend_the_wait(listener: socket.socket) -> None:
    """A load balancer's or a Kubernetes probe connects all the time."""
    is_over = threading.Event()

    def probe() -> None:
        while not is_over.wait(0.01):
            socket.create_connection(listener.getsockname()).close()

    prober = threading.Thread(target=probe)
    prober.start()
    listener.settimeout(0.2)
    try:
        with pytest.raises(TimeoutError):
            accept_authenticated(listener, SECRET.encode())
    finally:
        is_over.set()
        prober.join()
