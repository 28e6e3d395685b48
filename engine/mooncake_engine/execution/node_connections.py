"""Connections between the nodes of an instance: authentication of both ends, detection of hosts
that are gone, and the messages that nodes exchange."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

logger = logging.getLogger(__name__)

_AUTH_TIMEOUT_S = 5.0
"""How long both ends of a new connection may take to authenticate each other."""
_CONNECT_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 1_000_000
"""Limit of a message's size, so that a peer can't make this node allocate without bound."""
# A host is considered gone when it has not answered keepalive probes for 5 + 3 * 3 s, or has not
# acknowledged data for as long.
_PROBES = (
    ("TCP_KEEPIDLE", 5),
    ("TCP_KEEPINTVL", 3),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 14_000),
)


class NodeHello(msgspec.Struct, frozen=True, tag="node"):
    """The first message of a node that joins.

    Args:
        node: rank of the node.
        num_nodes: number of nodes that it expects.
        num_ranks: number of ranks that it expects.
        version: its version of mooncake_engine.
        weights: fingerprint of its copy of the model.
        model, draft_model: paths of the models on its host; empty if there is no draft model.
        host: its address, as seen from node 0.
        scratch: a folder on its host, for the files by which its ranks find each other.
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
    """The first message on each of a rank's two connections.

    Args:
        token: the token that its node received in NodeWelcome.
        rank: number of the rank.
        is_orders: whether the connection carries orders; else extension messages.
    """

    token: str
    rank: int
    is_orders: bool


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Node 0 rejects a node that does not belong to this instance.

    Args:
        reason: why, for its log.
    """

    reason: str


class NodeWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Node 0 accepts a node, which then starts its ranks.

    Args:
        token: identifies this start of the instance, for RankHello.
        ranks: the ranks to start.
        num_ports: the number of free ports to find.
    """

    token: str
    ranks: tuple[int, ...]
    num_ports: int


class NodeReady(msgspec.Struct, frozen=True, tag="ready"):
    """A node has started its ranks.

    Args:
        pids: process ids of the ranks, in order.
        ports: free ports of the host.
    """

    pids: tuple[int, ...]
    ports: tuple[int, ...]


class RankEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A rank's process has exited.

    Args:
        rank: number of the rank.
        how: description of the exit.
    """

    rank: int
    how: str


class KillRank(msgspec.Struct, frozen=True, tag="kill"):
    """Kill a rank's process."""

    rank: int


class InstanceOver(msgspec.Struct, frozen=True, tag="over"):
    """The instance has shut down in order."""


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


def send_message(connection: Connection, message: NodeMessage) -> None:
    """Send a message; raises OSError if the other side is gone."""
    connection.send_bytes(_encode(message))


def receive_message(connection: Connection, timeout_s: float | None = None) -> NodeMessage:
    """Receive the next message.

    Raises:
        EOFError, OSError: the other side is gone, has sent nothing for ``timeout_s``, or has sent
            an invalid message.
    """
    if timeout_s is not None and not connection.poll(timeout_s):
        raise TimeoutError(f"no message within {timeout_s:g} s")
    try:
        message: NodeMessage = _decode(connection.recv_bytes(_MAX_MESSAGE_BYTES))
    except msgspec.DecodeError as exc:
        raise OSError(f"invalid message from a node: {exc}") from exc
    return message


def own_address(connection: Connection) -> str:
    """The address of this host on a TCP connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        return str(shared.getsockname()[0])


def shut_down(connection: Connection) -> None:
    """Shut down a connection that another thread reads from, which then sees its end. The caller
    still has to close the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def accept_authenticated(listener: socket.socket, key: bytes) -> Connection:
    """Accept the next connection that proves that it knows the key. Connections that do not, or
    take longer than ``_AUTH_TIMEOUT_S``, are closed.

    Raises:
        TimeoutError: no such connection came within the listener's timeout.
    """
    limit_s = listener.gettimeout()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        while True:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no connection was authenticated within {limit_s:g} s")
                listener.settimeout(left)
            accepted, address = listener.accept()
            with _authenticating(accepted) as connection:
                try:
                    deliver_challenge(connection, key)
                    answer_challenge(connection, key)
                except (AuthenticationError, EOFError, OSError) as exc:
                    logger.warning(
                        "rejected a connection from %s that is not authenticated: %s",
                        address[0],
                        exc,
                    )
                    connection.close()
                else:
                    return connection
    finally:
        listener.settimeout(limit_s)


def connect_authenticated(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a peer, and authenticate both ends with the key.

    Raises:
        AuthenticationError: the peer has another key.
        OSError, EOFError: the peer can't be reached, or closes the connection.
    """
    with _authenticating(socket.create_connection(address, _CONNECT_TIMEOUT_S)) as connection:
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def _authenticating(connected: socket.socket) -> Iterator[Connection]:
    """Yield the connection of a socket, and shut it down if the block takes longer than
    ``_AUTH_TIMEOUT_S``."""
    _set_tcp_options(connected)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    timeout = threading.Timer(_AUTH_TIMEOUT_S, shut_down, [connection])
    timeout.start()
    try:
        yield connection
    finally:
        timeout.cancel()


def _set_tcp_options(connected: socket.socket) -> None:
    """Set TCP options: send small messages at once, and detect a host that vanishes."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # all exist on Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
