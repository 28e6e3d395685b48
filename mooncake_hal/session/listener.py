"""Accepts connections on any stream socket, lets in who proves to belong here, and dials others.

For threads; ``aio`` does the same on a loop. Both run the same handshake under the same ``Limits``.
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
from mooncake_hal.session.frames import LENGTH_BYTES, Seals, check_length, frame
from mooncake_hal.session.strangers import LIMITS, Limits, Strangers

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_SECONDS = 0.05
"""After a failed accept, such as for want of descriptors or threads: trying at once would spin."""

_PEER_CREDENTIALS = struct.Struct("3i")
"""The kernel's ``struct ucred``: process, user, group."""

DEAD_HOST_SECONDS = 60
"""After how long without a word from the other host's kernel an idle connection is given up."""


@dataclass(frozen=True, slots=True, eq=False)
class ProvenSocket:
    """A connected socket whose two ends have proved themselves.

    Args:
        sock: blocking; the receiver closes it.
        seals: of its frames, for those who exchange frames over it.
    """

    sock: socket.socket
    seals: Seals


class _Visitor:
    """An accepted connection; wrapping it in TLS replaces the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock


class Listener:
    """A listening socket and its thread; each connection gets a thread of its own.

    Args:
        sock: listens already, on TCP or a Unix path; closed with this.
        credentials: what a peer has to prove.
        epoch: identity of this endpoint.
        serve: takes over a connection that is let in, on its thread, until it ends. The socket is
            closed afterwards.
        tls: wraps connections; None leaves them as they are.
        limits: on what strangers may cost.
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
        self._strangers: Strangers[_Visitor] = Strangers(limits)
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._wake_out, self._wake_in = socket.socketpair()
        name = f"{credentials.protocol}-listener"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, end handshakes, and wait for every thread. Idempotent.

        Connections that were let in are their owner's to end, before this.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for visitor in self._strangers.all():
                hang_up(visitor.sock)
        self._wake_in.send(b"x")
        self._thread.join()
        for sock in (self._sock, self._wake_in, self._wake_out):
            sock.close()
        for thread in list(self._threads):
            thread.join()

    # -- the listening thread -------------------------------------------------------------------

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
            deadline = self._strangers.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _expire(self) -> None:
        """Cut off those whose time for the handshake is over, whatever they wait for."""
        with self._lock:  # under which sockets are closed: a number may be another's right after
            for visitor in self._strangers.expire(time.monotonic()):
                hang_up(visitor.sock)

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError as exc:  # the client left, or descriptors ran out: both may pass
            logger.warning("%s: can't accept a connection: %s", self._credentials.protocol, exc)
            time.sleep(ACCEPT_PAUSE_SECONDS)
            return
        # An unnamed Unix socket has no address: all of them count as one host.
        host = str(address[0]) if address else ""
        visitor, name = _Visitor(sock), f"{self._credentials.protocol}-peer"
        thread = threading.Thread(target=self._meet, args=(visitor,), name=name, daemon=True)
        with self._lock:
            evicted = self._strangers.enter(visitor, host, time.monotonic())
            self._threads.add(thread)
            if evicted is not None:
                hang_up(evicted.sock)
        try:
            thread.start()
        except RuntimeError as exc:  # the host has no thread left, which may pass
            logger.warning("%s: can't serve a connection: %s", self._credentials.protocol, exc)
            with self._lock:
                self._strangers.leave(visitor)
                self._threads.discard(thread)
                sock.close()
            time.sleep(ACCEPT_PAUSE_SECONDS)

    # -- a connection's thread ------------------------------------------------------------------

    def _meet(self, visitor: _Visitor) -> None:
        protocol = self._credentials.protocol
        try:
            proven = self._admit(visitor)
            with self._lock:
                is_wanted = self._strangers.leave(visitor) and not self._closing
            if is_wanted:
                visitor.sock.settimeout(None)
                self._serve(ProvenSocket(visitor.sock, Seals.of_server(proven)))
        except (PeerLost, TransferTimeout) as exc:
            logger.debug("%s: a peer left: %s", protocol, exc)
        except HalError as exc:
            logger.warning("%s: refused a peer: %s", protocol, exc)
        except Exception:  # thread top: one connection must not end the listener
            logger.exception("%s: a connection failed", protocol)
        finally:
            with self._lock:
                self._strangers.leave(visitor)
                visitor.sock.close()
                self._threads.discard(threading.current_thread())

    def _admit(self, visitor: _Visitor) -> Proven:
        deadline = time.monotonic() + self._limits.handshake_s
        try:
            tune(visitor.sock)
            if self._tls is not None:
                visitor.sock.settimeout(self._limits.handshake_s)
                visitor.sock = self._tls.wrap_socket(
                    visitor.sock, server_side=True, do_handshake_on_connect=False
                )
        except OSError as exc:
            raise PeerLost(f"the peer is gone already: {exc}") from exc
        if isinstance(visitor.sock, ssl.SSLSocket):
            shake_hands_tls(visitor.sock)
        handshake = self._credentials.accept(self._epoch, foreign_user(visitor.sock))
        return shake_hands(visitor.sock, handshake, deadline, self._limits.stranger_frame_bytes)


def foreign_user(sock: socket.socket) -> str:
    """Why a process of this host is refused because of its user, or nothing.

    Whoever connects to a Unix socket may get descriptors of our memory. So the kernel must say
    that it is our own user, or root, besides the proof of the secret.
    """
    if sock.family != socket.AF_UNIX:
        return ""
    process, user = peer_credentials(sock)
    if user in (os.getuid(), 0):
        return ""
    return f"process {process} belongs to user {user}, not {os.getuid()}"


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """What the kernel says of the other end of a Unix socket: its process and its user.

    The process is 0 if it is outside our pid namespace.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process, user, _group = _PEER_CREDENTIALS.unpack(credentials)
    return process, user


def shake_hands_tls(sock: ssl.SSLSocket) -> None:
    """Run either side of a TLS handshake, within the socket's timeout.

    Raises:
        AccessDenied: the peer shows no certificate of our authority, or not for its host.
        TransferTimeout, PeerLost: the peer was too slow, or the connection broke.
    """
    try:
        sock.do_handshake()
    except TimeoutError as exc:
        raise TransferTimeout("the peer does not end the TLS handshake in time") from exc
    except ssl.SSLError as exc:
        raise AccessDenied(f"TLS refused: {exc}") from exc
    except OSError as exc:
        raise PeerLost(f"the connection broke during the TLS handshake: {exc}") from exc


def shake_hands(
    sock: socket.socket, handshake: Handshake, deadline: float, limit: int = 4096
) -> Proven:
    """Run one side of a handshake over a blocking socket; reads nothing that follows it.

    Args:
        sock: connected; its timeout is changed.
        handshake: the side.
        deadline: ``time.monotonic`` value, of all of it.
        limit: longest frame of the peer's.

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
        raise TransferTimeout("the peer did not end the handshake in time") from exc
    except OSError as exc:
        raise PeerLost(f"the connection broke during the handshake: {exc}") from exc


def dial(
    open_socket: Callable[[float], socket.socket],
    where: str,
    credentials: Credentials,
    epoch: bytes,
    timeout: float,
) -> ProvenSocket:
    """Connect to a listener and prove ourselves, and have it do the same.

    Args:
        open_socket: connects, in as many seconds as it is given; raises OSError or TransferError.
        where: names the listener in messages.
        credentials: of both ends.
        epoch: the listener's, from its address.
        timeout: for all of it, in seconds.

    Raises:
        PeerLost: nothing listens there, or the listener has another epoch.
        TransferTimeout: it took longer.
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
        proven = shake_hands(sock, credentials.connect(epoch), deadline)
        sock.settimeout(None)
    except OSError as exc:
        sock.close()
        raise PeerLost(f"{protocol}: can't connect to {where}: {exc}") from exc
    except TransferError:
        sock.close()
        raise
    return ProvenSocket(sock, Seals.of_client(proven))


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and notice when the other host is gone. Raises OSError."""
    if sock.family == socket.AF_UNIX:
        return  # its other end is on this host: the kernel says at once when it is gone
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_HOST_SECONDS // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_HOST_SECONDS // 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_HOST_SECONDS * 1000)


def hang_up(sock: socket.socket) -> None:
    """End the conversation, so that a thread blocked on it returns; keeps the descriptor."""
    with contextlib.suppress(OSError):  # ended already
        # Not sock.shutdown: TLS would want to say goodbye first, and wait for the peer.
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
