"""The side channel: a ROUTER that answers peers, and DEALERs that ask them. Loop thread only."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import zmq
import zmq.asyncio

from mooncake_engine.errors import HandshakeRefused, KVTransferError, PortTaken
from mooncake_engine.kv_transfer.protocol import (
    MAX_FRAME_BYTES,
    AnyMessage,
    BadFrame,
    Message,
    Reject,
    seal,
    unseal,
)

logger = logging.getLogger(__name__)

Handler = Callable[[AnyMessage], AnyMessage]
Answer = TypeVar("Answer", bound=Message)

TRY_TIMEOUT_S = 2.0
TRIES = 3


def tcp_url(host: str, port: int | str) -> str:
    """A ZeroMQ address; IPv6 hosts get their brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class SideChannelServer:
    """Answers every well-formed request, and rejects every other one without harm.

    Args:
        context: ZeroMQ context of the connector.
        host: where to listen.
        ports: the first free one of them is taken; 0 is any.
        secret: of the deployment.
        handler: from request to answer; quick, and raises nothing but HandshakeRefused.

    Raises:
        PortTaken: others listen on all of them.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        ports: Iterable[int],
        secret: bytes,
        handler: Handler,
    ) -> None:
        self._secret = secret
        self._handler = handler
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        try:
            self._bind(host, ports)
        except PortTaken:
            self._socket.close()
            raise
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rsplit(":", 1)[1])

    def _bind(self, host: str, ports: Iterable[int]) -> None:
        problems = []
        for port in ports:
            try:
                self._socket.bind(tcp_url(host, port or "*"))
            except zmq.ZMQError as exc:
                problems.append(f"port {port}: {exc.strerror}")
            else:
                return
        tried = f"{len(problems)} ports tried, the last: " if len(problems) > 1 else ""
        raise PortTaken(f"side channel on {host} can't be bound: {tried}{problems[-1]}")

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 2:
                logger.warning("side channel: dropped a message of %d frames", len(frames))
                continue
            answer = seal(self._answer(frames[1]), self._secret)
            await self._socket.send_multipart([frames[0], answer])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _answer(self, frame: bytes) -> AnyMessage:
        try:
            request = unseal(frame, self._secret)
        except BadFrame as exc:
            logger.warning("side channel: rejected %s", exc)
            return Reject(0, str(exc))
        try:
            return self._handler(request)
        except HandshakeRefused as exc:
            return Reject(request.ticket, str(exc))


class SideChannelClient:
    """Asks one peer. Requests are repeated until answered, since all of them may be.

    Args:
        context: ZeroMQ context of the connector.
        host, port: the peer's side channel.
        secret: of the deployment.

    Raises:
        KVTransferError: the host can't be an address.
    """

    def __init__(self, context: zmq.asyncio.Context, host: str, port: int, secret: bytes) -> None:
        self.url = tcp_url(host, port)
        self._secret = secret
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AnyMessage]] = {}
        self._end: KVTransferError | None = None
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            self._socket.connect(self.url)
        except zmq.ZMQError as exc:
            self._socket.close()
            raise KVTransferError(f"{self.url!r} is no address of a side channel: {exc}") from exc

    async def receive(self) -> None:
        """Hand answers to those who asked, until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = unseal(frames[-1], self._secret)
            except BadFrame as exc:
                logger.warning("side channel: %s answered with %s", self.url, exc)
                continue
            self._deliver(message)

    async def ask(
        self,
        make: Callable[[int], AnyMessage],
        kind: type[Answer],
        *,
        tries: int = TRIES,
        try_timeout_s: float | None = None,
    ) -> Answer:
        """Send a request until it is answered.

        Args:
            make: from ticket to request.
            kind: the answer's type.
            tries: how often to send it.
            try_timeout_s: how long to wait for an answer each time; None is TRY_TIMEOUT_S.

        Raises:
            KVTransferError: no answer, or one of another kind, or this end was closed.
            HandshakeRefused: the peer rejected the request; its reason is the message.
        """
        if try_timeout_s is None:
            try_timeout_s = TRY_TIMEOUT_S
        ticket = next(self._tickets)
        answer = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            for _ in range(tries):
                await self._send(make(ticket))
                done, _pending = await asyncio.wait({answer}, timeout=try_timeout_s)
                if done:
                    return _expect(answer.result(), kind, self.url)
        finally:
            del self._waiting[ticket]
        raise KVTransferError(
            f"peer {self.url} did not answer within {tries * try_timeout_s:g} s; "
            "it is gone, overloaded, or has another secret"
        )

    def close(self, reason: str) -> None:
        """Disconnect; those who wait for an answer are told why there will be none."""
        self._socket.close()
        self._end = KVTransferError(f"the connection to peer {self.url} was given up: {reason}")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._end)

    async def _send(self, message: AnyMessage) -> None:
        """Queue a message for the peer; a full queue loses it, as a network would."""
        if self._end is not None:
            raise self._end
        with contextlib.suppress(zmq.Again):
            await self._socket.send(seal(message, self._secret), zmq.NOBLOCK)

    def _deliver(self, message: AnyMessage) -> None:
        waiting = self._waiting.get(message.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        elif isinstance(message, Reject):
            logger.warning("side channel: %s rejected a message: %s", self.url, message.reason)


def _expect(message: AnyMessage, kind: type[Answer], url: str) -> Answer:
    if isinstance(message, Reject):
        raise HandshakeRefused(f"peer {url} refused: {message.reason}")
    if not isinstance(message, kind):
        raise KVTransferError(f"peer {url} answered {type(message).__name__}, not {kind.__name__}")
    return message
