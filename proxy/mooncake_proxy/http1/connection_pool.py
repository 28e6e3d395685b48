"""The pool of connections to one instance, through which all requests to it are sent."""

from __future__ import annotations

import asyncio
import errno
import ssl
import sys
from collections.abc import Callable

from mooncake_proxy.errors import (
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    OutOfSockets,
    UpstreamTimeout,
)
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext, UpstreamConnection

# Before Python 3.12 `asyncio.wait_for` loses a cancellation that arrives in the same iteration of
# the loop as the result (python/cpython#86296).
if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

# Errors of connect() that are this host's fault, not the instance's.
_LOCAL_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}

__all__ = ["ConnectionPool", "postpone_timeouts", "sweep_timeouts", "timeout"]


class ConnectionPool:
    """Connections to one instance. Reused in LIFO order, so that spare ones time out."""

    def __init__(self, origin: Origin, context: ClientContext, name: str | None = None) -> None:
        self.origin = origin
        self.context = context
        # Instance name in errors.
        self.name = name or str(origin)
        self._idle: list[UpstreamConnection] = []
        # 0 once the pool is closed.
        self._max_idle = context.limits.max_idle

    async def exchange(
        self,
        payload: bytes,
        deadline: float,
        *,
        await_body: bool,
        abandon: Callable[[UpstreamConnection], object] = UpstreamConnection.finish,
    ) -> UpstreamConnection:
        """Send a request and wait for its response.

        `with await pool.exchange(...) as answer:` returns the connection to the pool at the end of
        the block.

        Args:
            payload: bytes of the request.
            deadline: loop time at which the exchange fails.
            await_body: wait for the whole response instead of its head.
            abandon: called with the connection if the caller is cancelled while it waits: finishes
                (closes) it, or half-closes it.

        Raises:
            Rejected: the status is not 200. Contains the whole response.
            UpstreamError: the exchange failed.
        """
        connection = self._idle.pop() if self._idle else None
        is_reused = connection is not None
        lost: ConnectionLost | None = None
        while True:
            if connection is None:
                connection = await self._reconnect(deadline, lost)
            try:
                waiter = connection.send(payload, deadline, await_body=await_body)
                if waiter is not None:
                    await waiter
                if not connection.is_good:
                    await connection.check()
            except ConnectionLost as error:
                connection.finish()
                # A server may close an idle connection just as it is reused. In contrast to a
                # crash during the response, no byte was received then: retry on a new connection.
                if connection.num_received or not is_reused:
                    raise
                lost = error if connection.was_sent else None
                connection, is_reused = None, False
            except asyncio.CancelledError:
                abandon(connection)
                raise
            except BaseException:
                connection.finish()
                raise
            else:
                return connection

    async def _reconnect(self, deadline: float, lost: ConnectionLost | None) -> UpstreamConnection:
        """Open a connection.

        If a reused connection was `lost` after the request had been sent, and the instance refuses
        a new one, it has died with the request: that loss is raised instead of ConnectFailed.
        """
        try:
            return await self.connect(deadline)
        except ConnectFailed as error:
            if lost is None:
                raise
            raise lost from error

    async def fetch(self, payload: bytes, deadline: float) -> bytes:
        """Send a request and return the whole body of the response."""
        with await self.exchange(payload, deadline, await_body=True) as answer:
            return answer.body

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next exchange, or close it if enough are idle."""
        if len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove an idle connection that the instance has closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections; busy ones are closed at the end of their exchange."""
        self._max_idle = 0
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def fail_silent(self, since: float, unanswered_since: float) -> int:
        """Fail the exchanges that are silent (`UpstreamConnection.is_silent`), for an instance that
        answers nothing else either. Returns their number."""
        silent = [
            each
            for each in self.context.connections
            if each.owner is self and each.is_silent(since, unanswered_since)
        ]
        for each in silent:
            each.fail(UpstreamTimeout(self.name, "silent, and no health check is answered"))
        return len(silent)

    async def connect(self, deadline: float) -> UpstreamConnection:
        """Open a connection. Raises ConnectFailed, OutOfSockets or DeadlineExceeded."""
        # Runs in a task of its own: if the request is cancelled just as the connection is
        # established, the connection is kept for the next request.
        task = self.context.loop.create_task(self._connect(deadline))
        try:
            return await task
        except asyncio.CancelledError:
            task.add_done_callback(self._keep_unused)
            raise

    def _keep_unused(self, task: asyncio.Task[UpstreamConnection]) -> None:
        """Keep a connection whose request was cancelled while it was being established."""
        if not task.cancelled() and task.exception() is None:
            self.release(task.result())

    async def _connect(self, deadline: float) -> UpstreamConnection:
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
            if exc.errno in _LOCAL_ERRORS:
                raise OutOfSockets(self.name, f"no connection from this host: {exc}") from exc
            raise ConnectFailed(self.name, f"no connection: {exc}") from exc
        except (ValueError, OverflowError) as exc:  # an impossible host or port
            raise ConnectFailed(self.name, f"no such address: {exc}") from exc

    async def _create(self) -> UpstreamConnection:
        origin = self.origin
        tls = self.context.tls_of(origin.scheme)
        connection = UpstreamConnection(self)
        try:
            await self.context.loop.create_connection(
                lambda: connection, origin.host, origin.port, ssl=tls
            )
        except BaseException:
            connection.close()  # it may just have been established
            raise
        return connection


def sweep_timeouts(context: ClientContext) -> None:
    """Fail all exchanges that have timed out; called a few times per second."""
    now = context.loop.time()
    for connection in [c for c in context.connections if c.is_overdue(now)]:
        if now > connection.deadline:
            connection.fail(DeadlineExceeded(connection.name))
        else:
            connection.fail(UpstreamTimeout(connection.name, "silent for longer than its limit"))


def postpone_timeouts(context: ClientContext, stopped_s: float) -> None:
    """Don't count the last `stopped_s` seconds as silence: this process could not read in them.

    The deadlines of requests stay, as their clients have waited.
    """
    now = context.loop.time()
    for connection in context.connections:
        connection.since = min(connection.since + stopped_s, now)
