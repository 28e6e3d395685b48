"""Connections to one instance, and how an exchange takes one of them."""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType

from mooncake_proxy.errors import ConnectFailed, ConnectionLost, UpstreamTimeout
from mooncake_proxy.http1.connection import ClientContext, Connection
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.timing import timeout


class Upstream:
    """`async with pool.send(payload, deadline) as connection:` — status known inside.

    Leaving the block gives a finished connection back and closes an unfinished one.
    """

    __slots__ = ("_connection", "_deadline", "_lingers", "_payload", "_pool", "left")

    def __init__(self, pool: Pool, payload: bytes, deadline: float, *, lingers: bool) -> None:
        self._lingers = lingers
        # The connection when the block was cancelled: the caller may still hang up politely.
        self.left: Connection | None = None
        self._pool = pool
        self._payload = payload
        self._deadline = deadline
        self._connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        connection = self._pool.take_idle()
        is_reused = connection is not None
        while True:
            if connection is None:
                connection = await self._pool.connect(self._deadline)
            self._connection = connection
            try:
                connection.send(self._payload, self._deadline)
                waiter = connection.head_waiter()
                if waiter is not None:
                    await waiter
                connection.check()
            except ConnectionLost:
                connection.finish()
                # A server may close an idle connection just as it is used again; that no byte
                # came back tells it from a crash in the middle.
                if connection.num_received or not is_reused:
                    raise
                connection, is_reused = None, False
            except BaseException as error:
                self._leave(connection, error)
                raise
            else:
                return connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._leave(self._connection, error)

    def _leave(self, connection: Connection, error: BaseException | None) -> None:
        if self._lingers and isinstance(error, asyncio.CancelledError):
            self.left = connection
        else:
            connection.finish()


class Pool:
    """Connections to one instance. The latest used is taken first, so that spare ones time out."""

    def __init__(self, origin: Origin, context: ClientContext) -> None:
        self.origin = origin
        self.context = context
        self.name = str(origin)
        self._idle: list[Connection] = []
        self._is_closed = False

    def send(self, payload: bytes, deadline: float, *, lingers: bool = False) -> Upstream:
        """An exchange as an async context manager; `deadline` in loop time.

        With `lingers`, a cancelled exchange is handed to the caller in `left` instead of closed.
        """
        return Upstream(self, payload, deadline, lingers=lingers)

    def take_idle(self) -> Connection | None:
        """An open connection, if there is one."""
        return self._idle.pop() if self._idle else None

    def give_back(self, connection: Connection) -> None:
        """Keep for the next exchange."""
        if self._is_closed or len(self._idle) >= self.context.limits.max_idle:
            connection.close()
        else:
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """An idle connection was closed from the other side."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle ones; busy ones end with their exchange."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def connect(self, deadline: float) -> Connection:
        """A new connection, or ConnectFailed."""
        remaining = max(0.0, deadline - self.context.loop.time())
        limit = min(self.context.limits.connect_timeout_s, remaining)
        try:
            async with timeout(limit):
                _, connection = await self._create()
        except asyncio.TimeoutError as exc:
            raise ConnectFailed(self.name, f"no connection within {limit:.1f} s") from exc
        except (OSError, ssl.SSLError) as exc:
            raise ConnectFailed(self.name, f"no connection: {exc}") from exc
        return connection

    async def _create(self) -> tuple[asyncio.BaseTransport, Connection]:
        origin = self.origin
        tls = self.context.tls or ssl.create_default_context() if origin.scheme == "https" else None
        return await self.context.loop.create_connection(
            lambda: Connection(self), origin.host, origin.port, ssl=tls
        )


def sweep_timeouts(context: ClientContext) -> None:
    """Fail every exchange whose deadline has passed; called a few times a second."""
    now = context.loop.time()
    for connection in [c for c in context.busy if c.deadline < now]:
        connection.fail(UpstreamTimeout(connection.name, "silent for longer than its limit"))
