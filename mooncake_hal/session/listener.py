"""Accepts and opens authenticated connections over any stream socket, with threads.

``aio`` does the same on an event loop. Both run the same handshake under the same ``Limits``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_hal.errors import AccessDenied, HalError, PeerLost, TransferError, TransferTimeout
from mooncake_hal.session.authentication import Credentials, Handshake, Proven
from mooncake_hal.session.connection_limits import LIMITS, Limits, PendingHandshakes
from mooncake_hal.session.frames import LENGTH_BYTES, Seals, check_length, frame

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_SECONDS = 0.05
"""Pause after a failed accept, for example without free descriptors or threads: retrying
immediately would spin."""

_PEER_CREDENTIALS = struct.Struct("3i")
"""The kernel's ``struct ucred``: process, user, group."""

DEAD_HOST_SECONDS = 60
"""An idle connection is considered lost if the other host's kernel is silent for this long."""


@dataclass(frozen=True, slots=True, eq=False)
class ProvenSocket:
    """A connected socket whose two ends have proved themselves.

    Args:
        sock: the blocking socket; owned and closed by the receiver of this object.
        seals: this end's seals, for protocols that exchange frames over the socket.
    """

    sock: socket.socket
    seals: Seals


class _PendingConnection:
    """An accepted connection in its handshake; wrapping it in TLS replaces the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock


class Listener:
    """A listening socket and its thread; each connection gets a thread of its own.

    Args:
        sock: a socket that already listens, on TCP or a Unix path; closed with the listener.
        credentials: what a peer has to prove.
        epoch: identity of this endpoint.
        serve: serves an authenticated connection until it ends, on the connection's thread. The
            listener closes the socket afterwards.
        tls: TLS context for the connections; None: no TLS.
        limits: limits on the resources that unauthenticated peers may use.

    Raises:
        TransferError: its thread can't be started; the socket is closed then.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        epoch: bytes,
        serve: Callable[[ProvenSocket], None],
        *,
        tls: ssl.SSLContext | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.error: BaseException | None = None
        self._sock = sock
        self._credentials = credentials
        self._epoch = epoch
        self._serve = serve
        self._tls = tls
        self._limits = limits
        self._lock = threading.Lock()
        self._handshakes: PendingHandshakes[_PendingConnection] = PendingHandshakes(limits)
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._wake_out, self._wake_in = socket.socketpair()
        name = f"{credentials.protocol}-listener"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._close_sockets()
            raise TransferError(
                f"{credentials.protocol}: the listening thread can't be started: {exc}"
            ) from exc

    def close(self) -> None:
        """Stop accepting, abort handshakes in progress, and join every thread. Idempotent.

        The owner must have closed all authenticated connections before.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for pending in self._handshakes.all():
                hang_up(pending.sock)
        self._wake_in.send(b"x")
        self._thread.join()
        self._close_sockets()
        for thread in list(self._threads):
            thread.join()

    def _close_sockets(self) -> None:
        for sock in (self._sock, self._wake_in, self._wake_out):
            sock.close()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for sock in (self._sock, self._wake_out):
                    selector.register(sock, selectors.EVENT_READ)
                while not self._closing:
                    ready = {key.fileobj for key, _ in selector.select(self._until_deadline())}
                    self._expire()
                    if self._sock in ready and not self._closing:
                        self._accept()
        except Exception as exc:  # thread top: raised by the endpoint's next call
            logger.exception("%s: the listening thread failed", self._credentials.protocol)
            self.error = exc

    def _until_deadline(self) -> float | None:
        with self._lock:
            deadline = self._handshakes.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _expire(self) -> None:
        """Shut down the connections whose handshake has timed out."""
        with self._lock:  # sockets are closed under it, after which a descriptor may be reused
            for pending in self._handshakes.expire(time.monotonic()):
                hang_up(pending.sock)

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError as exc:  # the client left, or descriptors ran out; both may be temporary
            logger.warning("%s: can't accept a connection: %s", self._credentials.protocol, exc)
            time.sleep(ACCEPT_PAUSE_SECONDS)
            return
        # Unnamed Unix sockets have no address: they all count as one host, those of other users as
        # another. Every user may connect to an abstract name, and these evict only each other.
        unnamed = "other users" if foreign_user(sock) else ""
        host = str(address[0]) if address else unnamed
        pending, name = _PendingConnection(sock), f"{self._credentials.protocol}-peer"
        thread = threading.Thread(target=self._handle, args=(pending,), name=name, daemon=True)
        with self._lock:
            evicted = self._handshakes.enter(pending, host, time.monotonic())
            self._threads.add(thread)
            if evicted is not None:
                hang_up(evicted.sock)
        try:
            thread.start()
        except RuntimeError as exc:  # the host has no thread left, which may be temporary
            logger.warning("%s: can't serve a connection: %s", self._credentials.protocol, exc)
            with self._lock:
                self._handshakes.leave(pending)
                self._threads.discard(thread)
                sock.close()
            time.sleep(ACCEPT_PAUSE_SECONDS)

    def _handle(self, pending: _PendingConnection) -> None:
        protocol = self._credentials.protocol
        try:
            proven = self._authenticate(pending)
            with self._lock:
                is_wanted = self._handshakes.leave(pending) and not self._closing
            if is_wanted:
                pending.sock.settimeout(None)
                self._serve(ProvenSocket(pending.sock, Seals.of_server(proven)))
        except (PeerLost, TransferTimeout) as exc:
            logger.debug("%s: a peer left: %s", protocol, exc)
        except HalError as exc:
            logger.warning("%s: rejected a peer: %s", protocol, exc)
        except Exception:  # thread top: a failed connection must not end the listener
            logger.exception("%s: a connection failed", protocol)
        finally:
            with self._lock:
                self._handshakes.leave(pending)
                pending.sock.close()
                self._threads.discard(threading.current_thread())

    def _authenticate(self, pending: _PendingConnection) -> Proven:
        deadline = time.monotonic() + self._limits.handshake_s
        try:
            tune(pending.sock)
            if self._tls is not None:
                pending.sock.settimeout(self._limits.handshake_s)
                pending.sock = self._tls.wrap_socket(
                    pending.sock, server_side=True, do_handshake_on_connect=False
                )
        except OSError as exc:
            raise PeerLost(f"the peer has already left: {exc}") from exc
        if isinstance(pending.sock, ssl.SSLSocket):
            run_tls_handshake(pending.sock)
        handshake = self._credentials.accept(self._epoch, foreign_user(pending.sock))
        return run_handshake(pending.sock, handshake, deadline, self._limits.handshake_frame_bytes)


def foreign_user(sock: socket.socket) -> str:
    """Return why a process of this host is rejected because of its user; empty if it is not.

    A peer on a Unix socket may be sent descriptors of our memory. So besides the proof of the
    secret, the kernel must confirm that it runs as our own user or as root.
    """
    if sock.family != socket.AF_UNIX:
        return ""
    process, user = peer_credentials(sock)
    if user in (os.getuid(), 0):
        return ""
    return f"process {process} belongs to user {user}, not {os.getuid()}"


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the other end of a Unix socket, as the kernel reports them.

    The pid is 0 if the process is outside our pid namespace.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process, user, _group = _PEER_CREDENTIALS.unpack(credentials)
    return process, user


def run_tls_handshake(sock: ssl.SSLSocket) -> None:
    """Run either side of a TLS handshake, within the socket's timeout.

    Raises:
        AccessDenied: the peer has no certificate of our authority, or not one for its host.
        TransferTimeout, PeerLost: the peer was too slow, or the connection broke.
    """
    try:
        sock.do_handshake()
    except TimeoutError as exc:
        raise TransferTimeout("the peer did not finish the TLS handshake in time") from exc
    except ssl.SSLError as exc:
        raise AccessDenied(f"TLS refused: {exc}") from exc
    except OSError as exc:
        raise PeerLost(f"the connection broke during the TLS handshake: {exc}") from exc


def run_handshake(
    sock: socket.socket, handshake: Handshake, deadline: float, limit: int = 4096
) -> Proven:
    """Run one side of a handshake over a blocking socket; reads no bytes beyond it.

    Args:
        sock: a connected socket; its timeout is changed.
        handshake: our side of the handshake.
        deadline: ``time.monotonic`` value by which the handshake must be done.
        limit: longest frame of the peer, in bytes.

    Raises:
        TransferTimeout: the deadline passed.
        TransferError: see ``Credentials``.
    """
    try:
        step = next(handshake)
        while True:
            if step.message:
                sock.settimeout(_left(deadline))
                sock.sendall(frame(step.message))
            reply = b""
            if step.awaits_reply:
                head = _receive_exactly(sock, LENGTH_BYTES, deadline)
                reply = _receive_exactly(sock, check_length(head, limit), deadline)
            step = handshake.send(reply)
    except StopIteration as end:
        proven: Proven = end.value
        return proven
    except TimeoutError as exc:
        raise TransferTimeout("the peer did not finish the handshake in time") from exc
    except OSError as exc:
        raise PeerLost(f"the connection broke during the handshake: {exc}") from exc


def dial(
    open_socket: Callable[[float], socket.socket],
    where: str,
    credentials: Credentials,
    epoch: bytes,
    timeout: float,
) -> ProvenSocket:
    """Connect to a listener and authenticate both ends.

    Args:
        open_socket: connects within the given number of seconds; raises OSError or TransferError.
        where: name of the listener, for messages.
        credentials: the credentials of both ends.
        epoch: the listener's epoch, from its address.
        timeout: timeout of connecting and of the handshake together, in seconds.

    Raises:
        PeerLost: no process listens there, or the listener has another epoch.
        TransferTimeout: it took longer than ``timeout``.
        AccessDenied, VersionMismatch: see ``Credentials``.
    """
    protocol, deadline = credentials.protocol, time.monotonic() + timeout
    if timeout <= 0:
        raise TransferTimeout(f"{protocol}: no time left to connect to {where}")
    try:
        sock = open_socket(timeout)
    except TimeoutError as exc:
        message = f"{protocol}: {where} did not reply within {timeout:g} s"
        raise TransferTimeout(message) from exc
    except OSError as exc:
        raise PeerLost(f"{protocol}: can't connect to {where}: {exc}") from exc
    try:
        tune(sock)
        proven = run_handshake(sock, credentials.connect(epoch), deadline)
        sock.settimeout(None)
    except OSError as exc:
        sock.close()
        raise PeerLost(f"{protocol}: can't connect to {where}: {exc}") from exc
    except TransferError:
        sock.close()
        raise
    return ProvenSocket(sock, Seals.of_client(proven))


def tune(sock: socket.socket) -> None:
    """Configure a TCP socket to send small frames immediately and to detect a dead host. Raises
    OSError."""
    if sock.family == socket.AF_UNIX:
        return  # the other end is on this host: the kernel reports its end immediately
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_HOST_SECONDS // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_HOST_SECONDS // 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_HOST_SECONDS * 1000)


def hang_up(sock: socket.socket) -> None:
    """Shut a connection down, so that a thread which is blocked on it returns; the descriptor stays
    open."""
    with contextlib.suppress(OSError):  # already shut down
        # Not sock.shutdown: TLS would send its close message first and wait for the peer.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    parts = []
    while size:
        sock.settimeout(_left(deadline))
        part = sock.recv(size)
        if not part:
            raise PeerLost("the peer closed the connection during the handshake")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
