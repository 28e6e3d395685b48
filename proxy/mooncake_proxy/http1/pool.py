"""Connections to one instance, and how an exchange takes one of them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from mooncake_proxy.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, UpstreamTimeout
from mooncake_proxy.http1.connection import ClientContext, Connection
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.timing import timeout


class Pool:
    """Connections to one instance. The latest used is taken first, so that spare ones time out."""

    def __init__(self, origin: Origin, context: ClientContext, name: str | None = None) -> None:
        self.origin = origin
        self.context = context
        # What errors are said to be of.
        self.name = name or str(origin)
        self._idle: list[Connection] = []
        # 0 once the pool is closed.
        self._max_idle = context.limits.max_idle

    async def exchange(
        self,
        payload: bytes,
        deadline: float,
        *,
        whole: bool,
        abandon: Callable[[Connection], object] = Connection.finish,
    ) -> Connection:
        """Send and wait for the head of the answer, or the `whole` of it; `deadline` in loop time.
        Rejected for any status but 200, with the whole answer.

        `with await pool.exchange(...) as answer:` gives the connection back. If cancelled while
        waiting, `abandon` decides what becomes of it: finished, which closes it, or hung up.
        """
        connection = self._idle.pop() if self._idle else None
        is_reused = connection is not None
        while True:
            if connection is None:
                connection = await self.connect(deadline)
            try:
                connection.send(payload, deadline, whole=whole)
                while connection.is_awaited:
                    await connection.bell
                if not connection.is_good:
                    await connection.check()
            except ConnectionLost:
                connection.finish()
                # A server may close an idle connection just as it is used again; that no byte
                # came back tells it from a crash in the middle.
                if connection.num_received or not is_reused:
                    raise
                connection, is_reused = None, False
            except asyncio.CancelledError:
                abandon(connection)
                raise
            except BaseException:
                connection.finish()
                raise
            else:
                return connection

    async def fetch(self, payload: bytes, deadline: float) -> bytes:
        """The whole body of an answer."""
        with await self.exchange(payload, deadline, whole=True) as answer:
            return answer.body

    def give_back(self, connection: Connection) -> None:
        """Keep for the next exchange."""
        if len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: Connection) -> None:
        """An idle connection was closed from the other side."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle ones; busy ones end with their exchange."""
        self._max_idle = 0
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def connect(self, deadline: float) -> Connection:
        """A new connection, or ConnectFailed."""
        # Time limits need a task, and whoever asks may run without one.
        task = self.context.loop.create_task(self._connect(deadline))
        try:
            return await task
        except asyncio.CancelledError:
            task.add_done_callback(self._keep_unasked)
            raise

    def _keep_unasked(self, task: asyncio.Task[Connection]) -> None:
        """Who asked for the connection left just as it came to stand."""
        if not task.cancelled() and task.exception() is None:
            self.give_back(task.result())

    async def _connect(self, deadline: float) -> Connection:
        remaining = max(0.0, deadline - self.context.loop.time())
        limit = min(self.context.limits.connect_timeout_s, remaining)
        try:
            async with timeout(limit):
                return await self._create()
        except asyncio.TimeoutError as exc:
            if limit == remaining:
                raise DeadlineExceeded(self.name) from exc
            raise ConnectFailed(self.name, f"no connection within {limit:.1f} s") from exc
        except (OSError, ssl.SSLError) as exc:
            raise ConnectFailed(self.name, f"no connection: {exc}") from exc

    async def _create(self) -> Connection:
        origin = self.origin
        tls = self.context.tls or ssl.create_default_context() if origin.scheme == "https" else None
        connection = Connection(self)
        try:
            await self.context.loop.create_connection(
                lambda: connection, origin.host, origin.port, ssl=tls
            )
        except BaseException:
            connection.close()  # cut off, it may just have come to stand
            raise
        return connection


def sweep_timeouts(context: ClientContext) -> None:
    """Fail every exchange whose deadline has passed; called a few times a second."""
    now = context.loop.time()
    for connection in [c for c in context.connections if c.is_overdue(now)]:
        if now > connection.deadline:
            connection.fail(DeadlineExceeded(connection.name))
        else:
            connection.fail(UpstreamTimeout(connection.name, "silent for longer than its limit"))
