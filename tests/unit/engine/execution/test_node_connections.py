"""Strangers hold up no connection that is authenticated, and a slow reader loses none."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest

from mooncake_engine.execution import node_connections
from mooncake_engine.execution.node_connections import (
    AuthenticatedListener,
    await_slow_reader,
    connect_authenticated,
)

KEY = b"0123456789abcdef0123456789abcdef"
TIMEOUT_S = 60.0


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def listener(listening: socket.socket) -> Iterator[AuthenticatedListener]:
    with closing(AuthenticatedListener(listening, KEY)) as accepting:
        yield accepting


def test_strangers_hold_up_nobody(
    listening: socket.socket, listener: AuthenticatedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than may be authenticated at a time; they say nothing for longer than this test runs."""
    monkeypatch.setattr(node_connections, "_AUTH_TIMEOUT_S", 10 * TIMEOUT_S)
    address = listening.getsockname()
    with ExitStack() as strangers:
        silent = [
            strangers.enter_context(socket.create_connection(address))
            for _ in range(node_connections._MAX_PENDING + 2)
        ]
        with connect_authenticated(address, KEY) as theirs, listener.accept(TIMEOUT_S) as ours:
            theirs.send("a rank")
            assert ours.recv() == "a rank"
        silent[0].settimeout(TIMEOUT_S)
        while silent[0].recv(1000):  # the challenge, then the end
            pass


@pytest.mark.parametrize("drips", [False, True])
def test_silent_and_slow_strangers_are_rejected(
    drips: bool,
    listening: socket.socket,
    listener: AuthenticatedListener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(node_connections, "_AUTH_TIMEOUT_S", 0.3)
    is_over = threading.Event()

    def drip(stranger: socket.socket) -> None:
        with suppress(OSError):
            for piece in [(100).to_bytes(4, "big"), *[b"x"] * 90]:
                stranger.sendall(piece)
                if is_over.wait(0.05):
                    return

    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(listening.getsockname()) as stranger,
        ThreadPoolExecutor(1) as threads,
    ):
        if drips:
            threads.submit(drip, stranger)
        stranger.settimeout(TIMEOUT_S)
        with suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
        is_over.set()
    deadline = time.monotonic() + TIMEOUT_S
    while "that is not authenticated" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "that is not authenticated" in caplog.text


def test_rejected_connections_do_not_extend_the_wait(
    listening: socket.socket, listener: AuthenticatedListener
) -> None:
    """A load balancer's or a Kubernetes probe connects all the time."""
    is_over = threading.Event()

    def probe() -> None:
        while not is_over.wait(0.01):
            socket.create_connection(listening.getsockname()).close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(probe)
        try:
            with pytest.raises(TimeoutError, match="no connection was authenticated"):
                listener.accept(0.2)
        finally:
            is_over.set()


@pytest.mark.parametrize("waits", [False, True])
def test_orders_wait_for_a_rank_that_computes(
    waits: bool,
    listening: socket.socket,
    listener: AuthenticatedListener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order is larger than the buffers of both hosts."""
    patience = [("TCP_USER_TIMEOUT", 200)]
    monkeypatch.setattr(node_connections, "_PROBES", patience)
    order = bytes(32 << 20)
    with (
        connect_authenticated(listening.getsockname(), KEY) as rank,
        listener.accept(TIMEOUT_S) as executor,
        ThreadPoolExecutor(1) as threads,
    ):
        if waits:
            await_slow_reader(executor)
            await_slow_reader(rank)
        sending = threads.submit(executor.send_bytes, order)
        time.sleep(2.0)
        if waits:
            assert rank.recv_bytes() == order
            assert sending.exception(TIMEOUT_S) is None
        else:
            assert isinstance(sending.exception(TIMEOUT_S), OSError)
