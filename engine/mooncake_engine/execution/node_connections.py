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
from queue import Empty, SimpleQueue

import msgspec

logger = logging.getLogger(__name__)

_AUTH_TIMEOUT_S = 5.0
"""How long both ends of a new connection may take to authenticate each other."""
_MAX_PENDING = 64
"""Most connections that are being authenticated at a time."""
_ACCEPT_RETRY_S = 0.1
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


class AuthenticatedListener:
    """Accepts the connections to a listening socket that prove that they know the key, in any
    order. They are authenticated beside one another, so that those that never prove it hold up no
    others; of more than ``_MAX_PENDING`` the oldest is closed. Others are closed after
    ``_AUTH_TIMEOUT_S``.

    Args:
        listener: the listening socket. It is closed with this object.
        key: the key.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener = listener
        self._key = key
        self._proven: SimpleQueue[Connection] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: list[Connection] = []  # the oldest first
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="authentication", daemon=True)
        self._thread.start()

    def accept(self, timeout_s: float) -> Connection:
        """Returns the next authenticated connection.

        Raises:
            TimeoutError: there was none within ``timeout_s``.
        """
        try:
            return self._proven.get(timeout=max(0.0, timeout_s))
        except Empty:
            raise TimeoutError(f"no connection was authenticated within {timeout_s:g} s") from None

    def close(self) -> None:
        """Stop listening, and close the connections that nobody has accepted. Idempotent."""
        with self._lock:
            self._is_closed = True
            for connection in self._pending:
                shut_down(connection)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(Empty):
            while True:
                self._proven.get_nowait().close()

    def _run(self) -> None:
        """The thread's main loop."""
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError as exc:
                if self._is_closed:
                    return
                logger.warning("could not accept a connection: %s", exc)
                time.sleep(_ACCEPT_RETRY_S)  # descriptors may have run out
                continue
            connection = _as_connection(connected)
            with self._lock:
                self._pending.append(connection)
                if len(self._pending) > _MAX_PENDING:
                    shut_down(self._pending.pop(0))
            threading.Thread(
                target=self._authenticate, args=(connection, address[0]), daemon=True
            ).start()

    def _authenticate(self, connection: Connection, host: str) -> None:
        is_proven = False
        try:
            with _auth_timeout(connection):
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            is_proven = True
        except (AuthenticationError, EOFError, OSError) as exc:
            logger.warning("rejected a connection from %s that is not authenticated: %s", host, exc)
        with self._lock:
            if connection in self._pending:
                self._pending.remove(connection)
            if is_proven and not self._is_closed:
                self._proven.put(connection)
                return
        connection.close()


def connect_authenticated(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a peer, and authenticate both ends with the key.

    Raises:
        AuthenticationError: the peer has another key.
        OSError, EOFError: the peer can't be reached, or closes the connection.
    """
    connection = _as_connection(socket.create_connection(address, _CONNECT_TIMEOUT_S))
    try:
        with _auth_timeout(connection):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def _as_connection(connected: socket.socket) -> Connection:
    _set_tcp_options(connected)
    connected.settimeout(None)
    return Connection(connected.detach())


@contextlib.contextmanager
def _auth_timeout(connection: Connection) -> Iterator[None]:
    """Shut the connection down if the block takes longer than ``_AUTH_TIMEOUT_S``."""
    timeout = threading.Timer(_AUTH_TIMEOUT_S, shut_down, [connection])
    timeout.start()
    try:
        yield
    finally:
        timeout.cancel()


def await_slow_reader(connection: Connection) -> None:
    """Let data wait for as long as the peer reads none, as a rank does not during a step. Linux
    applies TCP_USER_TIMEOUT to a peer with a full buffer, too, although its host answers. A host
    that vanishes is still noticed while nothing is unacknowledged, and by its other connections."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        if shared.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def _set_tcp_options(connected: socket.socket) -> None:
    """Set TCP options: send small messages at once, and detect a host that vanishes."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # all exist on Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
