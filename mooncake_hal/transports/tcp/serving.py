"""The server's side: the listener, and a thread per connection that serves it."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time

from mooncake_hal.errors import PeerLost, TransferError, TransferTimeout
from mooncake_hal.transports import handshake
from mooncake_hal.transports.regions import RegionTable
from mooncake_hal.transports.tcp import wire
from mooncake_hal.transports.tcp.streams import Outcome, Streams
from mooncake_hal.transports.tcp.tls import Tls

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.05
"""After a refused accept, such as for want of descriptors: trying at once would spin."""

MAX_STRANGERS = 64
"""How many connections may be open that have not proved anything yet."""


class Server:
    """Accepts connections, lets those in that know the secret, and serves them.

    Args:
        listener: a listening socket; the server closes it.
        streams: what moves the bytes.
        deployment, epoch: what the handshake is about.
        tls: how to wrap connections, or None.
    """

    def __init__(
        self,
        listener: socket.socket,
        streams: Streams,
        deployment: handshake.Deployment,
        epoch: bytes,
        tls: Tls | None,
    ) -> None:
        self.error: BaseException | None = None
        self._listener = listener
        self._streams = streams
        self._deployment = deployment
        self._epoch = epoch
        self._tls = tls
        self._stop = ctypes.c_int32(0)
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, socket.socket] = {}
        self._handle = streams.new_server()
        self._thread = threading.Thread(target=self._accept, name="mooncake-tcp", daemon=True)
        self._thread.start()

    def set_regions(self, table: RegionTable) -> None:
        """Serve the regions of ``table`` as it is now, and no others."""
        self._streams.set_regions(self._handle, table)

    def fence(self, start: int, end: int) -> None:
        """Break off what touches [start, end); returns when nothing does any more."""
        self._streams.fence(self._handle, start, end)

    def close(self) -> None:
        """End every connection and thread."""
        self._stop.value = 1
        wire.hang_up(self._listener)
        self._thread.join()
        self._listener.close()
        while True:
            with self._lock:
                served = dict(self._served)
            if not served:
                break
            for connection in served.values():
                wire.hang_up(connection)
            for thread in served:
                thread.join()
        self._streams.free_server(self._handle)

    def _accept(self) -> None:
        try:
            while not self._stop.value:
                self._accept_one()
        except Exception as exc:
            logger.exception("tcp: the listening thread failed")
            self.error = exc

    def _accept_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as exc:
            if not self._stop.value:
                logger.warning("tcp: can't accept a connection: %s", exc)
                time.sleep(ACCEPT_PAUSE_SECONDS)
            return
        if self._stop.value or not self._strangers.acquire(blocking=False):
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="mooncake-tcp-serve", daemon=True
        )
        with self._lock:
            self._served[thread] = connection
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            outcome = self._serve_proved(self._admit(connection))
            if outcome == Outcome.BROKEN:
                logger.warning("tcp: closed a connection whose client broke the protocol")
        except (PeerLost, TransferTimeout) as exc:
            logger.debug("tcp: a client left: %s", exc)
        except TransferError as exc:
            logger.warning("tcp: refused a client: %s", exc)
        except Exception:
            logger.exception("tcp: serving a connection failed")
        finally:
            with self._lock:
                open_ = self._served.pop(threading.current_thread())
                open_.close()

    def _admit(self, connection: socket.socket) -> socket.socket:
        """Let a client prove itself; returns the connection to serve.

        Raises:
            TransferError: it can't.
        """
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_server(connection)
                with self._lock:
                    self._served[threading.current_thread()] = connection
            challenge = self._deployment.challenge(self._epoch)
            wire.send_message(connection, challenge)
            hello = wire.receive_message(connection, handshake.Hello)
            try:
                welcome = self._deployment.check_client(challenge, hello)
            except TransferError as exc:
                wire.send_message(connection, handshake.Welcome(refusal=str(exc)))
                raise
            wire.send_message(connection, welcome)
            return connection
        finally:
            self._strangers.release()

    def _serve_proved(self, connection: socket.socket) -> int:
        try:
            wire.tune(connection)
            wire.choose_congestion_control(connection)
        except OSError as exc:
            raise PeerLost(f"tcp: the client has gone: {exc}") from exc
        return self._streams.serve(self._handle, connection, self._stop)
