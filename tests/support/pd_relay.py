"""A relay between two instances' side channels that loses, duplicates and delays messages."""

from __future__ import annotations

import asyncio
import random
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from mooncake_hal.errors import TransferError
from mooncake_hal.session.aio import AsyncSession, connect
from mooncake_hal.session.authentication import Credentials, fresh_epoch
from mooncake_hal.session.frames import (
    LENGTH_BYTES,
    Seals,
    SessionRequest,
    SessionResponse,
    frame,
)
from mooncake_kv.side_channel import credentials_of

Delivery = Callable[[str], list[float]]
"""Maps a message's kind to its deliveries, each a delay in seconds; empty: the message is lost."""

_REPLY_S = 30.0


def deliver(kind: str) -> list[float]:
    """Deliver every message once, at once."""
    return [0.0]


def unreliable(seed: int) -> Delivery:
    """Lose a third of the messages, duplicate a third; deliver all late and out of order."""
    numbers = random.Random(seed)

    def delivery(kind: str) -> list[float]:
        return [numbers.uniform(0.0, 0.15) for _ in range(numbers.choice((0, 1, 2)))]

    return delivery


def dropping(*kinds: str) -> Delivery:
    """Deliver every message except for these kinds."""
    return lambda kind: [] if kind in kinds else [0.0]


class Relay:
    """A listening port in front of another one; ``delivery`` may be changed at any time.

    The relay terminates both sessions, since sealed messages of one session can't be skipped or
    repeated.
    """

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        self.delivery: Delivery = deliver
        self.seen: list[str] = []
        self.port = 0
        self._target = (host, port)
        self._credentials = credentials
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        upstream = Upstream(*self._target, self._credentials)
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                seals = await _handshake(reader, writer, self._credentials)
                while True:
                    message = seals.incoming.open(await _read(reader))
                    if isinstance(message, SessionRequest):
                        self._relay(message, upstream, seals, writer)
                    else:  # a ping
                        writer.write(seals.outgoing.seal(SessionResponse(message.number)))  # type: ignore[union-attr]
            finally:
                upstream.close()
                writer.transport.abort()

    def _relay(
        self, request: SessionRequest, upstream: Upstream, seals: Seals, writer: StreamWriter
    ) -> None:
        async def ask() -> None:
            with suppress(TransferError):
                payload = await upstream.request(request.payload)
                response = SessionResponse(request.number, payload)
                self._deliver(payload, lambda: reply(response))

        async def reply(response: SessionResponse) -> None:
            if not writer.transport.is_closing():
                writer.write(seals.outgoing.seal(response))

        self._deliver(request.payload, ask)

    def _deliver(self, payload: bytes, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        kind = msgspec.msgpack.decode(payload)["kind"]
        self.seen.append(kind)
        for delay in self.delivery(kind):
            self._spawn(_later(delay, send))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Close all connections and cancel pending deliveries."""
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # let the connections close
            await asyncio.sleep(0)


class Upstream:
    """The relay's connection to the server for one client; reconnects when necessary."""

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        self._target = (host, port)
        self._credentials = credentials
        self._session: AsyncSession | None = None
        self._lock = asyncio.Lock()

    async def request(self, payload: bytes) -> bytes:
        """Forward a request; returns its reply."""
        async with self._lock:
            if self._session is None or self._session.closed.done():
                self._session = await connect(*self._target, self._credentials, timeout=_REPLY_S)
        return await self._session.request(payload, timeout=_REPLY_S)

    def close(self) -> None:
        """Disconnect."""
        if self._session is not None:
            self._session.close()


async def _handshake(reader: StreamReader, writer: StreamWriter, credentials: Credentials) -> Seals:
    handshake = credentials.accept(fresh_epoch())
    step = next(handshake)
    while True:
        writer.write(frame(step.message))
        try:
            step = handshake.send(await _read(reader) if step.awaits_reply else b"")
        except StopIteration as end:
            return Seals.of_server(end.value)


async def _read(reader: StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return await reader.readexactly(size)


async def _later(delay: float, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await asyncio.sleep(delay)
    await send()


@asynccontextmanager
async def relay(host: str, port: int, secret: bytes = b"") -> AsyncIterator[Relay]:
    """A relay in front of that side channel for the duration of a block."""
    between = Relay(host, port, credentials_of(secret))
    await between.start()
    try:
        yield between
    finally:
        await between.stop()
