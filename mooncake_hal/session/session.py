"""The threaded session: requests, pings, and the peer's registered and revoked regions."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeout
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import (
    PeerLost,
    RequestRejected,
    TransferError,
    TransferTimeout,
)
from mooncake_hal.session.connection_limits import LIMITS, Limits
from mooncake_hal.session.frames import (
    LENGTH_BYTES,
    AnyMessage,
    Ping,
    Registered,
    Revoked,
    SessionRequest,
    SessionResponse,
    check_length,
    respond,
)
from mooncake_hal.session.listener import ProvenSocket, hang_up, peer_credentials
from mooncake_hal.session.regions import AttachedRegions, RegionIndex
from mooncake_hal.transport import MemoryRegion

logger = logging.getLogger(__name__)

RequestHandler = Callable[["Session", bytes], bytes]
"""Handles a request and returns the reply; a HalError's message is sent back as a refusal."""

_POLLRDHUP = 0x2000


class RegionWatcher(Protocol):
    """Receives the peer's changes to its regions, on the session's thread, one call at a time.

    The session confirms a ping only after the calls for all earlier messages have returned.
    """

    def registered(self, key: int, region: MemoryRegion, attachment: bytes, fd: int | None) -> None:
        """Called when the peer registered a region. ``fd`` is the descriptor that came with it, if
        any; the session closes it after the call.

        Raises:
            TransferError: the region is invalid; the session ends.
        """
        ...

    def revoked(self, key: int) -> None:
        """Called when the peer revoked a region: once this returns, none of its memory may be
        accessed."""
        ...


def reject_requests(session: Session, payload: bytes) -> bytes:
    """Reject every request: the handler of an end that only sends requests."""
    raise RequestRejected("the connecting side accepts no requests")


class Session:
    """One end of a session after the handshake; both ends work alike.

    A thread runs ``run``, which receives the peer's messages; see ``start``.

    Args:
        proven: the authenticated connection; owned by the session.
        handler: handles the peer's requests, on the session's thread.
        limits: limits on the resources that the peer may use.
    """

    def __init__(
        self, proven: ProvenSocket, handler: RequestHandler, limits: Limits = LIMITS
    ) -> None:
        self.regions = AttachedRegions("the peer")
        self.error: TransferError | None = None
        self._sock = proven.sock
        self._seals = proven.seals
        self._handler = handler
        self._limits = limits
        self._takes_fds = proven.sock.family == socket.AF_UNIX
        self._fds: dict[int, int] = {}
        self._watcher: RegionWatcher | None = None
        self._on_end: Callable[[Session], None] | None = None
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        # guards `_fds` and `_watcher`; held during the watcher's calls
        self._region_lock = threading.Lock()
        self._outstanding: dict[int, Future[bytes]] = {}
        self._last_number = 0
        self._thread: threading.Thread | None = None
        # Receiving may block for ever, sending must not: SO_SNDTIMEO limits this direction only.
        self._sock.settimeout(None)
        seconds, fraction = divmod(limits.send_s, 1)
        timeval = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def start(self, name: str) -> None:
        """Run the session on a new thread.

        Raises:
            TransferError: no thread could be started; the connection is closed then.
        """
        thread = threading.Thread(target=self.run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            self._sock.close()
            raise TransferError(f"a session's thread can't be started: {exc}") from exc
        self._thread = thread

    def run(self) -> None:
        """Receive and process the peer's messages until the session ends."""
        if self._thread is None:
            self._thread = threading.current_thread()
        try:
            while True:
                self._receive()
        except PeerLost as exc:
            self._end(exc)
        except (TransferError, ValueError) as exc:
            self._end(PeerLost(f"the peer broke the session's protocol: {exc}"))
        except Exception as exc:  # thread top: the error must reach the waiting requests
            logger.exception("a session failed")
            self._end(PeerLost(f"the session failed: {exc!r}"))

    def watch(self, on_end: Callable[[Session], None]) -> None:
        """Register a callback for the end of the session; called once, and immediately if the
        session is over already."""
        with self._lock:
            self._on_end = on_end
            is_over = self.error is not None
        if is_over:
            on_end(self)

    def watch_regions(self, watcher: RegionWatcher) -> None:
        """Register a watcher of the peer's regions; it is called for the existing regions first.

        Raises:
            TransferError: the watcher raised it.
        """
        with self._region_lock:
            self._watcher = watcher
            for key, region, attachment in self.regions.items():
                self._notify_registered(watcher, key, region, attachment)

    def send(self, message: AnyMessage, fd: int | None = None) -> None:
        """Send one message, with a descriptor if one is given (over Unix sockets only).

        Raises:
            PeerLost: the connection is lost, or accepted no bytes for ``Limits.send_s``.
        """
        with self._send_lock:
            data = self._seals.outgoing.seal(message)
            try:
                if fd is not None:
                    sent = socket.send_fds(self._sock, [data], [fd])
                    data = data[sent:]
                self._sock.sendall(data)
            except OSError as exc:
                raise PeerLost(f"the connection broke while sending: {exc}") from exc

    def start_request(self, payload: bytes) -> Future[bytes]:
        """Send a request; returns a future of the reply, or of the TransferError."""
        return self._start(lambda number: SessionRequest(number, payload))

    def request(self, payload: bytes, timeout: float) -> bytes:
        """Send a request and wait for its reply.

        Raises:
            RequestRejected: the peer rejected it; the message has the peer's reason.
            PeerLost, TransferTimeout: no reply arrived.
        """
        return _result(self.start_request(payload), timeout)

    def ping(self) -> Future[bytes]:
        """Ask the peer to confirm that it has processed everything that was sent before."""
        return self._start(Ping)

    def barrier(self, timeout: float) -> None:
        """Wait until all messages that either end sent before this call have been processed.

        Raises:
            PeerLost, TransferTimeout: the peer did not confirm.
        """
        _result(self.ping(), timeout)

    def locate(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], timeout: float
    ) -> tuple[RegionIndex, NDArray[np.intp]]:
        """Find the peer's region around each span. If there is none for a span, wait for the
        registrations that the peer has sent by now and try once more.

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: a span is in no region.
            PeerLost, TransferTimeout: the peer did not confirm in time.
        """
        try:
            return self.regions.locate(addresses, nbytes)
        except TransferError:
            self.barrier(max(0.0, timeout))
            return self.regions.locate(addresses, nbytes)

    def peer_process(self) -> int:
        """Return the pid at the other end of a Unix socket; 0 if it is outside our namespace."""
        process, _user = peer_credentials(self._sock)
        return process

    def is_hung_up(self) -> bool:
        """Whether the other end has closed the connection, even if the session's thread has not
        noticed it yet."""
        if self.error is not None:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLHUP | _POLLRDHUP)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """Shut the connection down; the session's thread notices and ends."""
        hang_up(self._sock)

    def close(self) -> None:
        """Close the connection and join the session's thread, unless it is the caller.
        Idempotent."""
        self.hang_up()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._sock.close()

    def _receive(self) -> None:
        """Receive and process one message."""
        fds: list[int] = []
        try:
            size = check_length(self._receive_exactly(LENGTH_BYTES, fds), self._limits.frame_bytes)
            message = self._seals.incoming.open(self._receive_exactly(size, fds))
            self._process(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _receive_exactly(self, size: int, fds: list[int]) -> bytes:
        parts = []
        while size:
            try:
                part = self._receive_some(min(size, 1 << 20), fds)
            except OSError as exc:
                raise PeerLost(f"the connection broke: {exc}") from exc
            if not part:
                raise PeerLost("the peer closed the session")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _receive_some(self, size: int, fds: list[int]) -> bytes:
        if not self._takes_fds:
            return self._sock.recv(size)
        part, found, flags, _ = socket.recv_fds(self._sock, size, 1, socket.MSG_CMSG_CLOEXEC)
        fds += found
        if flags & socket.MSG_CTRUNC or len(fds) > 1:
            raise PeerLost("the peer broke the session's protocol: too many descriptors")
        return part

    def _process(self, message: AnyMessage, fds: list[int]) -> None:
        if isinstance(message, Registered):
            self._register(message, fds)
        elif isinstance(message, Revoked):
            with self._region_lock:
                self.regions.revoke(message.key)
                if (fd := self._fds.pop(message.key, None)) is not None:
                    os.close(fd)
                if self._watcher is not None:
                    self._watcher.revoked(message.key)
        elif isinstance(message, Ping):
            self.send(SessionResponse(message.number))
        elif isinstance(message, SessionRequest):
            self.send(respond(message, partial(self._handler, self)))
        else:
            self._complete(message)

    def _register(self, message: Registered, fds: list[int]) -> None:
        region = MemoryRegion(message.address, message.nbytes, message.device)
        with self._region_lock:
            self.regions.add(message.key, region, message.attachment)
            if fds:
                self._fds[message.key] = fds.pop()
            if self._watcher is not None:
                self._notify_registered(self._watcher, message.key, region, message.attachment)

    def _notify_registered(
        self, watcher: RegionWatcher, key: int, region: MemoryRegion, attachment: bytes
    ) -> None:
        fd = self._fds.pop(key, None)
        try:
            watcher.registered(key, region, attachment, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _start(self, make: Callable[[int], AnyMessage]) -> Future[bytes]:
        future: Future[bytes] = Future()
        with self._lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            self._last_number += 1
            number = self._last_number
            self._outstanding[number] = future
        try:
            self.send(make(number))
        except PeerLost as exc:
            self.hang_up()  # part of a frame may have been sent: no other frame can follow it
            with self._lock:
                waiting = self._outstanding.pop(number, None)
            if waiting is not None:
                waiting.set_exception(exc)
        return future

    def _complete(self, response: SessionResponse) -> None:
        with self._lock:
            future = self._outstanding.pop(response.number, None)
        if future is None:
            return  # no request of ours has that number
        if response.error:
            future.set_exception(RequestRejected(f"the peer refused: {response.error}"))
        else:
            future.set_result(response.payload)

    def _end(self, error: PeerLost) -> None:
        with self._lock:
            self.error = error
            waiting, self._outstanding = list(self._outstanding.values()), {}
            on_end = self._on_end
        with self._region_lock:
            fds, self._fds = list(self._fds.values()), {}
        for fd in fds:
            os.close(fd)
        for future in waiting:
            future.set_exception(error)
        if on_end is not None:
            on_end(self)


def _result(future: Future[bytes], timeout: float) -> bytes:
    try:
        return future.result(timeout)
    except FutureTimeout:
        raise TransferTimeout(f"the peer did not reply within {timeout:g} s") from None
