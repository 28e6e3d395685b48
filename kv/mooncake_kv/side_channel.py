"""The side channel: a server that answers peers, and clients that ask them. Loop thread only.

Both ends prove the deployment's secret before a message is believed: see ``mooncake_hal.session``.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from mooncake_hal.errors import AccessDenied, PortsExhausted, TransferError, VersionMismatch
from mooncake_hal.session.aio import AsyncListener, AsyncSession, connect, listen
from mooncake_hal.session.authentication import Credentials
from mooncake_kv.errors import (
    BadFrame,
    HandshakeRefused,
    KVTransferError,
    SessionRefused,
    SideChannelPortInUse,
)
from mooncake_kv.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    AnyMessage,
    Message,
    Reject,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

Handler = Callable[[AnyMessage], AnyMessage]
Answer = TypeVar("Answer", bound=Message)

TRY_TIMEOUT_S = 2.0
TRIES = 3

CONNECT_TIMEOUT_S = 10.0
"""Longer than a try: the tries of a busy peer share one connection attempt."""

RECONNECT_PAUSE_S = 0.1
MAX_RECONNECT_PAUSE_S = 1.0
"""Each pause before a reconnect is twice the previous one, up to this, until the peer answers. All
requests to a peer share it: requests may name thousands of peers that do not exist, and the loop
that tries to reach them serves all other peers, too."""

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_][\w-]{0,62}(\.[A-Za-z0-9_][\w-]{0,62})*\.?", re.A
)


def tcp_url(host: str, port: int | str) -> str:
    """Format an address for messages; IPv6 hosts get brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def credentials_of(secret: bytes) -> Credentials:
    """The credentials that both ends of a side channel prove to each other."""
    return Credentials(secret, "side channel", PROTOCOL_VERSION)


class SideChannelServer:
    """Answers every well-formed request, and rejects malformed ones. Created by ``listen``.

    Args:
        handler: computes the reply to a request, without blocking. HandshakeRefused becomes a
            Reject; any other exception is logged and ends the session with the peer, which asks
            again.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._listener: AsyncListener | None = None

    @classmethod
    async def listen(
        cls, host: str, ports: Iterable[int], secret: bytes, handler: Handler
    ) -> SideChannelServer:
        """Listen on the first free port; 0 is any.

        Raises:
            SideChannelPortInUse: all ports are in use, or the host can't be bound.
        """
        server, tried = cls(handler), tuple(ports)
        try:
            server._listener = await listen(host, tried, credentials_of(secret), server._respond)
        except PortsExhausted as exc:
            taken = f"port {tried[-1]}: {os.strerror(errno.EADDRINUSE)}"
            if len(tried) > 1:
                taken = f"{len(tried)} ports tried, the last: {taken}"
            raise SideChannelPortInUse(f"side channel on {host} can't be bound: {taken}") from exc
        except OSError as exc:
            raise SideChannelPortInUse(
                f"side channel on {host} can't be bound: {exc.strerror}"
            ) from exc
        return server

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._listener is not None
        return self._listener.port

    def close(self) -> None:
        """Stop listening and end the peers' sessions. Idempotent."""
        if self._listener is not None:
            self._listener.close()

    def _respond(self, session: AsyncSession, payload: bytes) -> bytes:
        return encode(self._reply_to(payload))

    def _reply_to(self, payload: bytes) -> AnyMessage:
        try:
            request = decode(payload)
        except BadFrame as exc:
            logger.warning("side channel: rejected %s", exc)
            return Reject(0, str(exc))
        try:
            return self._handler(request)
        except HandshakeRefused as exc:
            return Reject(request.ticket, str(exc))


class SideChannelClient:
    """Sends requests to one peer. All requests are idempotent, so they are retried until answered.

    Connects on first use, and reconnects whenever the session has ended.

    Args:
        host, port: address of the peer's side channel.
        secret: the deployment's secret.

    Raises:
        KVTransferError: the host is neither an address nor a valid name.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self.url = tcp_url(host, port)
        if not _may_be_host(host):
            raise KVTransferError(f"{self.url!r} is not a valid side channel address")
        self._host = host
        self._port = port
        self._credentials = credentials_of(secret)
        self._tickets = itertools.count(1)
        self._opening: asyncio.Task[AsyncSession] | None = None
        self._pause_s = 0.0
        self._has_answered = False
        self._asking: set[asyncio.Task[AnyMessage]] = set()
        self._end: KVTransferError | None = None

    async def ask(
        self,
        make: Callable[[int], AnyMessage],
        kind: type[Answer],
        *,
        tries: int = TRIES,
        try_timeout_s: float | None = None,
    ) -> Answer:
        """Send a request until it is answered; an answer to an earlier try counts.

        Args:
            make: makes the request, given its ticket.
            kind: the expected type of the answer.
            tries: how many times to send it.
            try_timeout_s: timeout of each try, in seconds; None is TRY_TIMEOUT_S.

        Raises:
            KVTransferError: no answer, or one of another type; or this client was closed. Raised
                without retries if the connection is refused and the peer has never answered.
            HandshakeRefused: the peer rejected the request, with its reason as the message.
            SessionRefused: the peer has another secret, or speaks another version.
        """
        if try_timeout_s is None:
            try_timeout_s = TRY_TIMEOUT_S
        ticket, attempts = next(self._tickets), set[asyncio.Task[AnyMessage]]()
        try:
            for _ in range(tries):
                attempts.add(self._attempt(make(ticket), tries * try_timeout_s))
                done, _pending = await asyncio.wait(
                    attempts, timeout=try_timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if self._end is not None:
                    raise self._end
                if done:
                    return _expect(done.pop().result(), kind, self.url)
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        raise KVTransferError(
            f"peer {self.url} did not answer within {tries * try_timeout_s:g} s; "
            "it is gone or overloaded"
        )

    @property
    def has_requests_in_flight(self) -> bool:
        """Whether a request is in flight."""
        return bool(self._asking)

    def close(self, reason: str) -> None:
        """Disconnect; requests in flight fail with the reason. Idempotent."""
        self._end = KVTransferError(f"the connection to peer {self.url} was closed: {reason}")
        for attempt in self._asking:
            attempt.cancel()
        if self._opening is None or self._opening.cancel() or self._opening.cancelled():
            return
        if self._opening.exception() is None:
            self._opening.result().close(reason)

    def _attempt(self, message: AnyMessage, timeout_s: float) -> asyncio.Task[AnyMessage]:
        if self._end is not None:
            raise self._end
        payload = encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise KVTransferError(f"a message of {len(payload)} bytes is too long for {self.url}")
        attempt = asyncio.ensure_future(self._send(payload, timeout_s))
        self._asking.add(attempt)
        attempt.add_done_callback(self._asking.discard)
        return attempt

    async def _send(self, payload: bytes, timeout_s: float) -> AnyMessage:
        """Send a request and return its answer; reconnects, and sends it again, if the session
        fails."""
        while True:
            try:
                session = await self._session()
                answer = decode(await session.request(payload, timeout=timeout_s))
                self._pause_s, self._has_answered = 0.0, True
                return answer
            except AccessDenied as exc:
                raise SessionRefused(
                    f"peer {self.url} has another secret; give every instance the same one"
                ) from exc
            except VersionMismatch as exc:
                raise SessionRefused(f"peer {self.url} refused: {exc}") from exc
            except BadFrame as exc:
                raise KVTransferError(f"peer {self.url} answered with {exc}") from exc
            except TransferError as exc:
                if not self._has_answered and _has_errno(exc, errno.ECONNREFUSED):
                    raise KVTransferError(f"nothing listens at peer {self.url}") from exc
                if is_out_of_descriptors(exc):
                    raise KVTransferError(
                        f"can't connect to peer {self.url}: {exc}; raise this instance's limit of "
                        "descriptors (ulimit -n, LimitNOFILE)"
                    ) from exc
                logger.debug("side channel: retrying %s: %s", self.url, exc)
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _session(self) -> AsyncSession:
        opening = self._opening
        if opening is None or (opening.done() and _is_over(opening)):
            opening = self._opening = asyncio.ensure_future(self._open())
            opening.add_done_callback(_is_over)  # or asyncio logs a failure as never retrieved
        # Not awaited directly: cancelling this request must not cancel it for the others.
        await asyncio.wait({opening})
        return opening.result()

    async def _open(self) -> AsyncSession:
        """Connect, after a pause that doubles with each session that brought no answer."""
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, RECONNECT_PAUSE_S), MAX_RECONNECT_PAUSE_S)
        return await connect(self._host, self._port, self._credentials, timeout=CONNECT_TIMEOUT_S)


def is_out_of_descriptors(exc: BaseException | None) -> bool:
    """Whether the exception was caused by this process, or host, being out of descriptors."""
    return _has_errno(exc, errno.EMFILE, errno.ENFILE)


def _has_errno(exc: BaseException | None, *wanted: int) -> bool:
    while exc is not None:
        if isinstance(exc, OSError) and exc.errno in wanted:
            return True
        exc = exc.__cause__
    return False


def _is_over(opening: asyncio.Task[AsyncSession]) -> bool:
    if opening.cancelled() or opening.exception() is not None:
        return True
    return opening.result().closed.done()


def _may_be_host(host: str) -> bool:
    """Whether the text is an address, or a valid name; resolvers fail in odd ways on others."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None
    return True


def _expect(message: AnyMessage, kind: type[Answer], url: str) -> Answer:
    if isinstance(message, Reject):
        raise HandshakeRefused(f"peer {url} refused: {message.reason}")
    if not isinstance(message, kind):
        raise KVTransferError(f"peer {url} answered {type(message).__name__}, not {kind.__name__}")
    return message
