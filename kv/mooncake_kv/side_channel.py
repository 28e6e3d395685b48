"""The side channel: a listener that replies to peers, and clients that ask them. Loop thread only.

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
from mooncake_kv.errors import BadFrame, HandshakeRefused, KVTransferError, SideChannelPortTaken
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
"""A pause is twice the one before it, up to this, until the peer answers; all who ask it share
them. Requests may name thousands of peers that do not exist, and the loop that tries them serves
all others, too."""

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_][\w-]{0,62}(\.[A-Za-z0-9_][\w-]{0,62})*\.?", re.A
)


def tcp_url(host: str, port: int | str) -> str:
    """Name an address in messages; IPv6 hosts get their brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def credentials_of(secret: bytes) -> Credentials:
    """What both ends of a side channel prove to each other."""
    return Credentials(secret, "side channel", PROTOCOL_VERSION)


class SideChannelServer:
    """Replies to every well-formed request, and rejects every other one without harm.

    See ``listen``.

    Args:
        handler: from request to reply; quick. What it raises but HandshakeRefused is logged, and
            ends the session with the peer, who asks again.
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
            SideChannelPortTaken: others listen on all of them.
        """
        server, tried = cls(handler), tuple(ports)
        try:
            server._listener = await listen(host, tried, credentials_of(secret), server._respond)
        except PortsExhausted as exc:
            taken = f"port {tried[-1]}: {os.strerror(errno.EADDRINUSE)}"
            if len(tried) > 1:
                taken = f"{len(tried)} ports tried, the last: {taken}"
            raise SideChannelPortTaken(f"side channel on {host} can't be bound: {taken}") from exc
        except OSError as exc:
            raise SideChannelPortTaken(
                f"side channel on {host} can't be bound: {exc.strerror}"
            ) from exc
        return server

    @property
    def port(self) -> int:
        """Where it listens."""
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
    """Asks one peer. Requests are repeated until answered, since all of them may be.

    Connects when it is first asked, and again whenever the session is over.

    Args:
        host, port: the peer's side channel.
        secret: of the deployment.

    Raises:
        KVTransferError: the host can't be an address.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self.url = tcp_url(host, port)
        if not _may_be_host(host):
            raise KVTransferError(f"{self.url!r} is no address of a side channel")
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
            make: from ticket to request.
            kind: the answer's type.
            tries: how often to send it.
            try_timeout_s: how long to wait for an answer each time; None is TRY_TIMEOUT_S.

        Raises:
            KVTransferError: no answer, or one of another kind, or the peer has another secret, or
                this end was closed. Nobody listens there, and it has never answered: at once.
            HandshakeRefused: the peer rejected the request; its reason is the message. Or it speaks
                another version.
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
    def is_asking(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._asking)

    def close(self, reason: str) -> None:
        """Disconnect; pending requests fail with the reason. Idempotent."""
        self._end = KVTransferError(f"the connection to peer {self.url} was given up: {reason}")
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
        """Send a request once, over a new session if need be; returns its answer."""
        while True:
            try:
                session = await self._session()
                answer = decode(await session.request(payload, timeout=timeout_s))
                self._pause_s, self._has_answered = 0.0, True
                return answer
            except AccessDenied as exc:
                raise KVTransferError(
                    f"peer {self.url} has another secret; give every instance the same one"
                ) from exc
            except VersionMismatch as exc:
                raise HandshakeRefused(f"peer {self.url} refused: {exc}") from exc
            except BadFrame as exc:
                raise KVTransferError(f"peer {self.url} answered with {exc}") from exc
            except TransferError as exc:
                if not self._has_answered and _has_errno(exc, errno.ECONNREFUSED):
                    raise KVTransferError(f"nobody listens at peer {self.url}") from exc
                if is_out_of_descriptors(exc):
                    raise KVTransferError(
                        f"peer {self.url} can't be connected to: {exc}; give this instance more "
                        "descriptors (ulimit -n, LimitNOFILE)"
                    ) from exc
                logger.debug("side channel: %s is asked again: %s", self.url, exc)
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _session(self) -> AsyncSession:
        opening = self._opening
        if opening is None or (opening.done() and _is_over(opening)):
            opening = self._opening = asyncio.ensure_future(self._open())
            opening.add_done_callback(_is_over)  # or asyncio logs a failure as never retrieved
        # Not awaited itself: a request that is cancelled must not take it from the others.
        await asyncio.wait({opening})
        return opening.result()

    async def _open(self) -> AsyncSession:
        """Connect; sooner or later, by how many sessions without an answer came before."""
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, RECONNECT_PAUSE_S), MAX_RECONNECT_PAUSE_S)
        return await connect(self._host, self._port, self._credentials, timeout=CONNECT_TIMEOUT_S)


def is_out_of_descriptors(exc: BaseException | None) -> bool:
    """Whether it was raised because this process, or host, may open nothing more."""
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
    """Whether it is an address, or may be a name; a resolver would fail in odd ways otherwise."""
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
