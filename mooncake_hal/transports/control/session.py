"""One authenticated control connection: pings, calls, and the regions that the peer announces."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeout

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import HalError, PeerLost, TransferError, TransferTimeout
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.control.messages import (
    Answer,
    AnyMessage,
    Call,
    Ping,
    Registered,
    Revoked,
    decode_any,
    receive_frame,
    send_frame,
)
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.regions import RegionIndex

logger = logging.getLogger(__name__)

SEND_SECONDS = 5.0
"""A peer whose control connection takes no bytes for this long is dropped."""

AnswerCall = Callable[["Session", bytes], bytes]
"""Answers a Call; a HalError's message is sent back instead of an answer."""


class Session:
    """Both ends use it alike once the handshake is over. ``run`` needs a thread of its own.

    Args:
        sock: a connected, authenticated TCP socket; owned from here on.
        answer: answers the peer's calls, on the session's thread.
    """

    def __init__(self, sock: socket.socket, answer: AnswerCall) -> None:
        self.regions = AttachedRegions("the peer")
        self.error: TransferError | None = None
        self._sock = sock
        self._answer = answer
        self._watcher: Callable[[Session], None] | None = None
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._waiting: dict[int, Future[bytes]] = {}
        self._next = 0
        self._thread: threading.Thread | None = None
        # Receiving waits for ever, sending must not: SO_SNDTIMEO bounds one direction only.
        sock.settimeout(None)
        seconds, micros = divmod(int(SEND_SECONDS * 1e6), 1_000_000)
        timeval = seconds.to_bytes(8, "little") + micros.to_bytes(8, "little")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def start(self, name: str) -> None:
        """Run on a new thread."""
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Take in what the peer says until the connection ends."""
        if self._thread is None:
            self._thread = threading.current_thread()
        try:
            while True:
                self._take(decode_any(receive_frame(self._sock)))
        except PeerLost as exc:
            self._end(exc)
        except (TransferError, ValueError) as exc:
            self._end(PeerLost(f"the peer broke the control protocol: {exc}"))
        except Exception as exc:  # thread top: the error must reach whoever waits
            logger.exception("control connection failed")
            self._end(PeerLost(f"control connection failed: {exc!r}"))

    def watch(self, watcher: Callable[[Session], None]) -> None:
        """Have ``watcher`` called once when the connection is over; at once if it is."""
        with self._lock:
            self._watcher = watcher
            over = self.error is not None
        if over:
            watcher(self)

    def send(self, message: AnyMessage) -> None:
        """Send one message; raises PeerLost."""
        with self._send_lock:
            send_frame(self._sock, message)

    def ask(self, payload: bytes) -> Future[bytes]:
        """Send a call; the future holds the answer, or the TransferError that there is none."""
        return self._request(lambda number: Call(number, payload))

    def call(self, payload: bytes, timeout: float) -> bytes:
        """Send a call and wait for its answer.

        Raises:
            PeerLost, TransferTimeout: no answer came.
            TransferError: the peer refused, its words in the message.
        """
        return _result(self.ask(payload), timeout)

    def ping(self) -> Future[bytes]:
        """Ask the peer to confirm that it has taken in all that was sent before."""
        return self._request(Ping)

    def barrier(self, timeout: float) -> None:
        """Wait until all that both ends sent before this call has been taken in.

        Raises:
            PeerLost, TransferTimeout: the peer did not confirm.
        """
        _result(self.ping(), timeout)

    def locate(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], timeout: float
    ) -> tuple[RegionIndex, NDArray[np.intp]]:
        """Find which of the peer's regions hold each piece; if one is nowhere, once more when all
        that the peer has registered by now is known.

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: a piece is nowhere.
            PeerLost, TransferTimeout: the peer did not say in time what it has registered.
        """
        try:
            return self.regions.locate(addresses, nbytes)
        except TransferError:
            self.barrier(max(0.0, timeout))
            return self.regions.locate(addresses, nbytes)

    def hang_up(self) -> None:
        """End the connection; its thread notices, and ends."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the peer was faster to end the control connection")

    def close(self) -> None:
        """End the connection and wait for its thread, unless this is that thread. Idempotent."""
        self.hang_up()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._sock.close()

    def _request(self, make: Callable[[int], AnyMessage]) -> Future[bytes]:
        future: Future[bytes] = Future()
        with self._lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            self._next += 1
            number = self._next
            self._waiting[number] = future
        try:
            self.send(make(number))
        except PeerLost as exc:
            with self._lock:
                waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.set_exception(exc)
        return future

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, Registered):
            region = MemoryRegion(message.address, message.nbytes, message.device)
            self.regions.add(message.key, region, message.attachment)
        elif isinstance(message, Revoked):
            self.regions.revoke(message.key)
        elif isinstance(message, Ping):
            self.send(Answer(message.number))
        elif isinstance(message, Call):
            self.send(self._answered(message))
        else:
            self._settle(message)

    def _answered(self, call: Call) -> Answer:
        try:
            return Answer(call.number, self._answer(self, call.payload))
        except HalError as exc:
            return Answer(call.number, error=str(exc) or type(exc).__name__)

    def _settle(self, answer: Answer) -> None:
        with self._lock:
            future = self._waiting.pop(answer.number, None)
        if future is None:
            return  # its caller gave up waiting
        if answer.error:
            future.set_exception(TransferError(f"the peer refused: {answer.error}"))
        else:
            future.set_result(answer.payload)

    def _end(self, error: PeerLost) -> None:
        with self._lock:
            self.error = error
            waiting, self._waiting = list(self._waiting.values()), {}
            watcher = self._watcher
        for future in waiting:
            future.set_exception(error)
        if watcher is not None:
            watcher(self)


def _result(future: Future[bytes], timeout: float) -> bytes:
    try:
        return future.result(timeout)
    except FutureTimeout:
        raise TransferTimeout(
            f"the peer's control connection is silent for {timeout:g} s"
        ) from None
