"""Helpers for streams and for clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from mooncake_engine.errors import EngineError

Item = TypeVar("Item")
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class RequestAborted(EngineError):
    """Somebody asked to abort the request."""


class ShuttingDown(EngineError):
    """The instance takes no new requests, or can't wait for the end of those that run."""


async def merge(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of several streams as they come, each with its stream's index.

    The first error of a stream ends the others and comes out here, as does closing this one.
    """
    if len(streams) == 1:  # the usual case needs no tasks
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | asyncio.Task[None]] = asyncio.Queue()
    tasks = {asyncio.create_task(_drain(i, stream, queue)) for i, stream in enumerate(streams)}
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        num_live = len(tasks)
        while num_live:
            entry = await queue.get()
            if isinstance(entry, asyncio.Task):
                entry.result()
                num_live -= 1
            else:
                yield entry
    finally:
        await cancel_all(tasks)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result], ending: asyncio.Future[EngineError]
) -> Result:
    """The result of ``work``, which is cancelled if the client goes away first.

    Args:
        receive: of an ASGI connection whose request body has been read.
        ending: done when the work has to end; its result says why.

    Raises:
        ClientGone, or the result of ``ending``: what came first; ``work`` has been cancelled and
            has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    waited: set[asyncio.Future[Any]] = {working, watching, ending}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ending.result() if ending.done() else ClientGone
    finally:
        await cancel_all(waited)


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their errors are nobody's any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(
    index: int,
    stream: AsyncGenerator[Item, None],
    queue: asyncio.Queue[tuple[int, Item] | asyncio.Task[None]],
) -> None:
    async with aclosing(stream):
        async for item in stream:
            queue.put_nowait((index, item))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
