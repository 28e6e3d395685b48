"""Connections between the hosts of an instance: how both ends prove themselves, how a host that is
gone is noticed, and what nodes say to each other."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

logger = logging.getLogger(__name__)

_PROVE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 1_000_000
# A host that does not answer is given up after 5 + 3 * 3 s, or when what was sent to it is not
# acknowledged for as long.
_PROBES = (
    ("TCP_KEEPIDLE", 5),
    ("TCP_KEEPINTVL", 3),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 14_000),
)


class NodeHello(msgspec.Struct, frozen=True, tag="node"):
    """A node wants to join.

    Args:
        node: its rank among the nodes, of ``num_nodes``.
        version: of mooncake_engine.
        weights: fingerprint of its copy of the model.
        model, draft_model: where its ranks find them; empty for no draft model.
        host: its address, as seen from node 0.
        scratch: a folder of its own, for files by which its ranks find each other.
    """

    node: int
    num_nodes: int
    num_ranks: int
    version: str
    weights: str
    model: str
    draft_model: str
    host: str
    scratch: str


class RankHello(msgspec.Struct, frozen=True, tag="rank"):
    """One of the two connections of a rank: its orders, or messages of its extension. ``token`` is
    what its node was welcomed with."""

    token: str
    rank: int
    is_orders: bool


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The node does not belong to this instance."""

    reason: str


class NodeWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Start these ranks, and find that many free ports."""

    token: str
    ranks: tuple[int, ...]
    num_ports: int


class NodeReady(msgspec.Struct, frozen=True, tag="ready"):
    """The process ids of the ranks, in order, and the ports."""

    pids: tuple[int, ...]
    ports: tuple[int, ...]


class RankEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A rank's process is over, and how."""

    rank: int
    how: str


class KillRank(msgspec.Struct, frozen=True, tag="kill"):
    """End a rank's process now."""

    rank: int


class InstanceOver(msgspec.Struct, frozen=True, tag="over"):
    """All has ended in order."""


NodeMessage = (
    NodeHello
    | RankHello
    | NodeRefused
    | NodeWelcome
    | NodeReady
    | RankEnded
    | KillRank
    | InstanceOver
)
_decode = msgspec.msgpack.Decoder(NodeMessage).decode
_encode = msgspec.msgpack.Encoder().encode


def tell(connection: Connection, message: NodeMessage) -> None:
    """Send a message; raises OSError where the other side is gone."""
    connection.send_bytes(_encode(message))


def hear(connection: Connection, timeout_s: float | None = None) -> NodeMessage:
    """The next message.

    Raises:
        EOFError, OSError: the other side is gone, silent for ``timeout_s``, or says what is none.
    """
    if timeout_s is not None and not connection.poll(timeout_s):
        raise TimeoutError(f"nothing was said for {timeout_s:g} s")
    try:
        message: NodeMessage = _decode(connection.recv_bytes(_MAX_MESSAGE_BYTES))
    except msgspec.DecodeError as exc:
        raise OSError(f"not a message between nodes: {exc}") from exc
    return message


def own_address(connection: Connection) -> str:
    """The address of this host, as the other end of a TCP connection sees it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        return str(shared.getsockname()[0])


def hang_up(connection: Connection) -> None:
    """End a connection that another thread reads from, as if the other side had; it is still to be
    closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def accept_known(listener: socket.socket, key: bytes) -> Connection:
    """The next connection that knows the key; others are turned away, and so is one that is silent,
    or drips, for longer than it needs.

    Raises:
        TimeoutError: none came within the listener's timeout.
    """
    while True:
        accepted, address = listener.accept()
        with _proving(accepted) as connection:
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
            except (AuthenticationError, EOFError, OSError) as exc:
                logger.warning("a connection from %s is not one of ours: %s", address[0], exc)
                connection.close()
            else:
                return connection


def connect_known(address: tuple[str, int], key: bytes) -> Connection:
    """A connection to who knows the key.

    Raises:
        AuthenticationError: it does not.
        OSError, EOFError: it can't be reached, or hangs up.
    """
    with _proving(socket.create_connection(address, _CONNECT_TIMEOUT_S)) as connection:
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def _proving(connected: socket.socket) -> Iterator[Connection]:
    """The connection, which is ended if what is said first takes too long."""
    _watch_peer(connected)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    ended_late = threading.Timer(_PROVE_TIMEOUT_S, hang_up, [connection])
    ended_late.start()
    try:
        yield connection
    finally:
        ended_late.cancel()


def _watch_peer(connected: socket.socket) -> None:
    """Send small messages at once, and notice a host that vanishes without a word."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # Linux has them all
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
