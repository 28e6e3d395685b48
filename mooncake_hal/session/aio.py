"""Sessions on an asyncio event loop: requests and replies between instances, in both directions.

    listener = await listen("0.0.0.0", range(8000, 8010), credentials, handler)
    session = await connect("192.0.2.1", 8000, credentials, timeout=5)
    reply = await session.request(b"...", timeout=2)

All objects must be used on the event loop on which they were created. ``Limits`` bounds the
resources that a peer may use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

from mooncake_hal.errors import (
    PeerLost,
    RequestNotSent,
    RequestRejected,
    TransferError,
    TransferTimeout,
)
from mooncake_hal.session.addressing import listen_on_first
from mooncake_hal.session.authentication import Credentials, Handshake, Proven, fresh_epoch
from mooncake_hal.session.connection_limits import LIMITS, Limits, PendingHandshakes
from mooncake_hal.session.frames import (
    AnyMessage,
    FrameReader,
    Ping,
    Seals,
    SessionRequest,
    SessionResponse,
    frame,
    respond,
)

logger = logging.getLogger(__name__)

BACKLOG = 256

MISSED_KEEPALIVES = 3
"""A peer that is silent for more than this many keepalive intervals is considered lost."""

_KEEPALIVE_NUMBER = 0
"""The number of keepalive pings, whose responses are ignored; requests are numbered from 1."""

_REQUEST_BYTES = 128
"""Upper bound of the bytes in a request's frame besides its payload."""

Handler = Callable[["AsyncSession", bytes], bytes]
"""Handles a request and returns the reply. Runs on the event loop and must not block. A HalError's
message is sent back as a refusal."""


def _refuse_requests(session: AsyncSession, payload: bytes) -> bytes:
    raise RequestRejected("the connecting side accepts no requests")


class AsyncSession(asyncio.Protocol):
    """One end of a session, and the asyncio protocol of its connection. See ``connect``.

    ``closed`` completes with the reason once the session is over. ``peer_epoch`` is the listening
    end's epoch, on both ends.

    Args:
        handshake: our side of the handshake.
        seals_of: creates this end's seals from the result of the handshake.
        handler: handles the peer's requests.
        limits: limits on the resources that the peer may use.
        listener: the listener that accepted the connection, or None.
    """

    def __init__(
        self,
        handshake: Handshake,
        seals_of: Callable[[Proven], Seals],
        handler: Handler,
        limits: Limits,
        listener: AsyncListener | None = None,
    ) -> None:
        self.peer_epoch = b""
        self.peer_host = ""
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[TransferError] = self._loop.create_future()
        self.proven: asyncio.Future[None] = self._loop.create_future()
        self._handshake = handshake
        self._seals_of = seals_of
        self._seals: Seals | None = None
        self._handler = handler
        self._limits = limits
        self._listener = listener
        self._reader = FrameReader(limits.handshake_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._outstanding: dict[int, asyncio.Future[bytes]] = {}
        self._last_number = _KEEPALIVE_NUMBER
        self._num_written = 0
        self._last_received = self._loop.time()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def request(self, payload: bytes, *, timeout: float) -> bytes:
        """Send a request and wait for its reply.

        Raises:
            RequestRejected: the peer rejected it; the message has the peer's reason.
            TransferTimeout: no reply arrived in time; a later one is dropped.
            PeerLost: the session is over.
            RequestNotSent: too many requests are outstanding, or this one is too long.
        """
        if self.closed.done():
            raise self.closed.result()
        if len(self._outstanding) >= self._limits.outstanding:
            raise RequestNotSent(f"{len(self._outstanding)} requests to the peer are outstanding")
        if len(payload) > self._limits.frame_bytes - _REQUEST_BYTES:
            raise RequestNotSent(f"a request of {len(payload)} bytes is too long for one frame")
        self._last_number += 1
        number = self._last_number
        reply = self._outstanding[number] = self._loop.create_future()
        try:
            self._send(SessionRequest(number, payload))
            done, _ = await asyncio.wait({reply}, timeout=timeout)
        finally:
            del self._outstanding[number]
        if not done:
            raise TransferTimeout(f"the peer did not reply within {timeout:g} s")
        found: bytes = reply.result()
        return found

    def close(self, reason: str = "this side closed the session") -> None:
        """Close the session; outstanding requests fail with ``reason``. Idempotent."""
        self._end(PeerLost(reason))

    def abort(self, error: TransferError) -> None:
        """End the session without flushing unsent data. Idempotent."""
        self._end(error, flush=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.send_buffer_bytes)
        self.peer_host = str((transport.get_extra_info("peername") or ("",))[0])
        self._call_later("handshake", self._limits.handshake_s, self._handshake_expired)
        if self._listener is not None:
            self._listener.entered(self)
        self._advance(None)

    def data_received(self, data: bytes) -> None:
        self._last_received = self._loop.time()
        self._reader.feed(data)
        try:
            while not self.closed.done() and (body := self._reader.take()) is not None:
                if self._seals is None:
                    self._advance(body)
                else:
                    self._process(self._seals.incoming.open(body))
        except TransferError as exc:
            self._end(exc)
        except Exception as exc:  # task top: a peer's message may end its own session only
            logger.exception("a session failed")
            self._end(PeerLost(f"the session failed: {exc!r}"))

    def pause_writing(self) -> None:
        self._watch_sending(-1)

    def resume_writing(self) -> None:
        self._cancel("sending")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(
            PeerLost(f"the connection broke: {exc}" if exc else "the peer closed the session")
        )

    def _advance(self, reply: bytes | None) -> None:
        """Run the handshake's next steps, up to one that awaits a reply of the peer."""
        assert self._transport is not None
        try:
            step = next(self._handshake) if reply is None else self._handshake.send(reply)
            while True:
                if step.message:
                    self._write(frame(step.message))
                if step.awaits_reply:
                    return
                step = self._handshake.send(b"")
        except StopIteration as end:
            self._prove(end.value)
        except TransferError as exc:
            self._end(exc)

    def _prove(self, proven: Proven) -> None:
        self.peer_epoch = proven.epoch
        self._seals = self._seals_of(proven)
        self._reader.limit = self._limits.frame_bytes
        self._cancel("handshake")
        if self._listener is not None:
            self._listener.proved(self)
        self._keep_alive()
        self.proven.set_result(None)

    def _handshake_expired(self) -> None:
        self.abort(TransferTimeout(f"no handshake within {self._limits.handshake_s:g} s"))

    def _process(self, message: AnyMessage) -> None:
        if isinstance(message, SessionRequest):
            self._send(respond(message, partial(self._handler, self)))
        elif isinstance(message, SessionResponse):
            self._complete(message)
        elif isinstance(message, Ping):
            self._send(SessionResponse(message.number))
        else:
            name = type(message).__name__
            raise PeerLost(f"the peer broke the session's protocol: unexpected {name}")

    def _complete(self, response: SessionResponse) -> None:
        reply = self._outstanding.get(response.number)
        if reply is None or reply.done():
            return  # the request timed out, or it was a keepalive
        if response.error:
            reply.set_exception(RequestRejected(response.error))
        else:
            reply.set_result(response.payload)

    def _send(self, message: AnyMessage) -> None:
        if self._seals is None or self._transport is None or self.closed.done():
            raise PeerLost("the session is over")
        data = self._seals.outgoing.seal(message)
        if len(data) > self._limits.frame_bytes:
            # The peer would end the session because of it, and with it all other requests.
            error = TransferError(f"a message of {len(data)} bytes is too long for one frame")
            self._end(error)
            raise error
        self._write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._limits.frame_bytes + self._limits.send_buffer_bytes:
            self.abort(PeerLost(f"the peer does not read: {waiting} bytes are unsent"))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._num_written += len(data)
        self._transport.write(data)

    def _watch_sending(self, num_sent_before: int) -> None:
        """Drop a peer that accepts no bytes at all; a slow one is bounded by the send buffer."""
        assert self._transport is not None
        num_sent = self._num_written - self._transport.get_write_buffer_size()
        if num_sent == num_sent_before:
            seconds = self._limits.send_s
            self.abort(PeerLost(f"the peer has accepted no bytes for {seconds:g} s"))
            return
        self._call_later("sending", self._limits.send_s, lambda: self._watch_sending(num_sent))

    def _keep_alive(self) -> None:
        every = self._limits.keepalive_s
        silent = self._loop.time() - self._last_received
        if silent > MISSED_KEEPALIVES * every:
            self.abort(PeerLost(f"the peer has been silent for {silent:.0f} s"))
            return
        if silent >= every / 2:
            self._send(Ping(_KEEPALIVE_NUMBER))
        if not self.closed.done():
            self._call_later("keepalive", every, self._keep_alive)

    def _call_later(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self._loop.call_later(seconds, call)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _end(self, error: TransferError, *, flush: bool = True) -> None:
        if self._transport is not None:
            if flush and "sending" not in self._timers:
                self._transport.close()
            else:
                self._transport.abort()
        if self.closed.done():
            return
        self.closed.set_result(error)
        for name in list(self._timers):
            self._cancel(name)
        if flush and self._transport is not None:  # if the peer does not accept the rest in time
            self._loop.call_later(self._limits.send_s, self._transport.abort)
        if not self.proven.done():
            self.proven.set_exception(error)
            self.proven.exception()  # or asyncio logs it as never retrieved
        for reply in self._outstanding.values():
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # its request may have been cancelled just now
        if self._listener is not None:
            self._listener.left(self, error)


class AsyncListener:
    """Accepts sessions; see ``listen``.

    ``port`` is the port that it listens on, ``epoch`` its identity for peers.
    """

    def __init__(self, port: int, epoch: bytes, limits: Limits) -> None:
        self.port = port
        self.epoch = epoch
        self.sessions: set[AsyncSession] = set()
        self._handshakes: PendingHandshakes[AsyncSession] = PendingHandshakes(limits)
        self._server: asyncio.AbstractServer | None = None

    def serve(self, server: asyncio.AbstractServer) -> None:
        """Set the server that accepts this listener's connections; the listener owns it."""
        self._server = server

    def close(self) -> None:
        """Stop listening and end every session. Idempotent."""
        if self._server is not None:
            self._server.close()
        for session in [*self._handshakes.all(), *self.sessions]:
            session.close("the listener was closed")

    def entered(self, session: AsyncSession) -> None:
        """Called for every accepted connection; may evict another one that is in its handshake."""
        now = asyncio.get_running_loop().time()
        evicted = self._handshakes.enter(session, session.peer_host, now)
        if evicted is not None:
            evicted.abort(PeerLost("too many connections are in their handshake"))

    def proved(self, session: AsyncSession) -> None:
        """Called when a session's peer has proved itself."""
        self._handshakes.leave(session)
        self.sessions.add(session)

    def left(self, session: AsyncSession, error: TransferError) -> None:
        """Called at the end of a session, or of a connection whose handshake failed."""
        self.sessions.discard(session)
        if self._handshakes.leave(session):
            level = logging.DEBUG if isinstance(error, PeerLost) else logging.WARNING
            logger.log(level, "rejected a peer at %s: %s", session.peer_host, error)


async def listen(
    host: str,
    ports: Iterable[int],
    credentials: Credentials,
    handler: Handler,
    *,
    limits: Limits = LIMITS,
    epoch: bytes | None = None,
) -> AsyncListener:
    """Accept sessions on the first free port, over IPv4 or IPv6.

    Args:
        host: name or address to listen on.
        ports: ports to try, in order; 0 means any port.
        credentials: what peers have to prove.
        handler: handles the peers' requests.
        limits: limits on the resources that each peer may use.
        epoch: the listener's identity for peers; None generates one.

    Raises:
        OSError: the host or a port can't be bound.
        PortsExhausted: all ports are in use.
    """
    sock = listen_on_first(host, ports, BACKLOG, credentials.protocol)
    listener = AsyncListener(sock.getsockname()[1], epoch or fresh_epoch(), limits)

    def accepted() -> AsyncSession:
        handshake = credentials.accept(listener.epoch)
        return AsyncSession(handshake, Seals.of_server, handler, limits, listener)

    loop = asyncio.get_running_loop()
    listener.serve(await loop.create_server(accepted, sock=sock, backlog=BACKLOG))
    return listener


async def connect(
    host: str,
    port: int,
    credentials: Credentials,
    *,
    timeout: float,
    epoch: bytes | None = None,
    limits: Limits = LIMITS,
) -> AsyncSession:
    """Connect to a listener and authenticate both ends.

    Args:
        host, port: the listener's address.
        credentials: the credentials of both ends.
        timeout: timeout of connecting and of the handshake together, in seconds.
        epoch: the required epoch of the listener; None accepts any, see
            ``AsyncSession.peer_epoch``.
        limits: limits on the resources that the peer may use.

    Raises:
        PeerLost: no process listens there, it has another epoch, or it broke the connection.
        AccessDenied, VersionMismatch: see ``Credentials``.
        TransferTimeout: it took longer than ``timeout``.
    """
    session = AsyncSession(credentials.connect(epoch), Seals.of_client, _refuse_requests, limits)
    opening = asyncio.ensure_future(_open(session, host, port))
    try:
        await asyncio.wait({opening}, timeout=timeout)
        if not opening.done():
            raise TransferTimeout(f"{host} port {port} did not reply within {timeout:g} s")
        opening.result()
    except BaseException:
        # Before the cancellation: otherwise a handshake that is about to succeed would complete a
        # session without an owner.
        session.abort(PeerLost("connecting was cancelled"))
        opening.cancel()
        raise
    return session


async def _open(session: AsyncSession, host: str, port: int) -> None:
    try:
        await asyncio.get_running_loop().create_connection(lambda: session, host, port)
        await session.proven
    except (OSError, ValueError) as exc:  # ValueError: an invalid host name, such as "a..b"
        raise PeerLost(f"can't connect to {host!r} port {port}: {exc}") from exc
    except asyncio.CancelledError:
        session.abort(PeerLost("connecting was cancelled"))
        raise
