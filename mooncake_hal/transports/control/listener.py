"""Accepts control connections and lets in who proves that it belongs to the deployment."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable

from mooncake_hal.errors import HalError, PeerLost, TransportUnavailable
from mooncake_hal.transports.control.messages import receive, send_frame
from mooncake_hal.transports.handshake import Challenge, Deployment, Hello, Welcome

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MAX_STRANGERS = 64
"""Connections that may be in the handshake at once; more are closed unheard."""


class Listener:
    """A listening socket and its thread; each connection gets a thread of its own.

    Args:
        sock: listens already; closed with this.
        deployment: what a peer has to prove.
        epoch: identity of this endpoint.
        serve: takes over a socket that is let in, on that connection's thread, until it ends.
    """

    def __init__(
        self,
        sock: socket.socket,
        deployment: Deployment,
        epoch: bytes,
        serve: Callable[[socket.socket], None],
    ) -> None:
        self._deployment = deployment
        self._epoch = epoch
        self._serve = serve
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._sock = sock
        self._wake_out, self._wake_in = socket.socketpair()
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="control-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, end handshakes, and wait for every thread. Idempotent.

        Connections that were let in are their owner's to end, before this.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            strangers = list(self._strangers)
        for sock in strangers:
            _shut(sock)
        self._wake_in.send(b"x")
        self._thread.join()
        for sock in (self._sock, self._wake_in, self._wake_out):
            sock.close()
        for thread in list(self._threads):
            thread.join()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._sock, self._wake_out], [], [])
            if self._wake_out in ready:
                return
            try:
                sock, _ = self._sock.accept()
            except OSError as exc:  # the client left, or descriptors ran out: both may pass
                logger.warning("control connection was not accepted: %s", exc)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closing or len(self._strangers) >= MAX_STRANGERS:
                sock.close()
                return
            self._strangers.add(sock)
            thread = threading.Thread(
                target=self._meet, args=(sock,), name="control-peer", daemon=True
            )
            self._threads.add(thread)
        thread.start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            accepted = self._handshake(sock)
            with self._lock:
                self._strangers.discard(sock)
                accepted = accepted and not self._closing
            if accepted:
                self._serve(sock)
        except Exception:  # thread top: one connection must not end the listener
            logger.exception("a control connection failed")
        finally:
            sock.close()
            with self._lock:
                self._strangers.discard(sock)
                self._threads.discard(threading.current_thread())

    def _handshake(self, sock: socket.socket) -> bool:
        """Return whether the peer is let in; tells it why not."""
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = self._deployment.challenge(self._epoch)
        try:
            send_frame(sock, challenge)
            welcome = self._deployment.check_client(challenge, receive(sock, Hello))
            send_frame(sock, welcome)
        except PeerLost as exc:
            logger.debug("a control connection ended in its handshake: %s", exc)
            return False
        except HalError as exc:
            logger.warning("a peer was refused: %s", exc)
            _try_to_send(sock, Welcome(refusal=str(exc)))
            return False
        return True


def dial(
    host: str, port: int, deployment: Deployment, epoch: bytes, timeout: float
) -> socket.socket:
    """Connect to a listener and prove ourselves, and have it do the same.

    Raises:
        PeerLost: nobody answers, or another incarnation.
        AccessDenied, VersionMismatch: see ``Deployment``.
        TransportUnavailable: no route leads there.
    """
    try:
        sock = socket.create_connection((host, port), timeout)
    except (ConnectionError, TimeoutError) as exc:
        raise PeerLost(f"nobody answers at {host}:{port}: {exc}") from exc
    except OSError as exc:
        raise TransportUnavailable(deployment.transport, f"{host}:{port}: {exc}") from exc
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = receive(sock, Challenge)
        hello = deployment.answer(challenge, epoch)
        send_frame(sock, hello)
        deployment.check_server(challenge, hello, receive(sock, Welcome))
    except BaseException:
        sock.close()
        raise
    return sock


def _try_to_send(sock: socket.socket, welcome: Welcome) -> None:
    try:
        send_frame(sock, welcome)
    except PeerLost:
        logger.debug("the refused peer left before it could be told")


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a control connection was closed already")
