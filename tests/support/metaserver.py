"""A metaserver like the proxy's: answers 202 at once and meanwhile sends a prefill to P."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from mooncake_kv.params import KVTransferDict

Dispatch = Callable[[str, KVTransferDict], Awaitable[None]]
"""Called with the last part of the posted path and the params."""


class Metaserver:
    """Listens on a free port of loopback.

    Args:
        dispatch: sends the prefill; runs concurrently with the answer.
        status: of every answer; nothing is dispatched unless it is 202.
        is_silent: accept connections and never answer.

    ``close`` re-raises a dispatch's error, unless ``is_failure_expected``.
    """

    def __init__(self, dispatch: Dispatch, *, status: int = 202, is_silent: bool = False) -> None:
        self.status = status
        self.is_silent = is_silent
        self.is_failure_expected = False
        self.posts: list[KVTransferDict] = []
        self.dispatch = dispatch
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def url(self, key: str) -> str:
        """The URL that a request names as its metaserver."""
        return f"http://127.0.0.1:{self.port}/v1/metaserver/{key}"

    async def close(self) -> None:
        """Stop listening and cancel the dispatches."""
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        for task in self._tasks:
            task.cancel()
        ended: list[Any] = await asyncio.gather(*self._tasks, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, Exception) and not self.is_failure_expected:
                raise failure

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0])
            params = json.loads(await reader.readexactly(length))
            self.posts.append(params)
            if self.is_silent:
                await reader.read()
                return
            writer.write(f"HTTP/1.1 {self.status} X\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            await writer.drain()
            if self.status == 202:
                self._tasks.add(asyncio.create_task(self._run(head, params)))
        finally:
            writer.close()

    async def _run(self, head: str, params: KVTransferDict) -> None:
        key = head.split(" ", 2)[1].rpartition("/")[2]
        await self.dispatch(key, params)


@asynccontextmanager
async def metaserver(dispatch: Dispatch, **options: Any) -> AsyncIterator[Metaserver]:
    """A metaserver for the duration of a block."""
    server = Metaserver(dispatch, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


class Post:
    """A metaserver in a thread of its own that records what is posted."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self._posted = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = Metaserver(self._take)
        self._run(self.server.start())

    def wait(self) -> dict[str, Any]:
        assert self._posted.wait(60)
        return self.params

    def close(self) -> None:
        self._run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _take(self, key: str, params: dict[str, Any]) -> None:
        self.params = params
        self._posted.set()

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)
