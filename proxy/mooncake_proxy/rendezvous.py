"""Where D asks for its prefill in the push flow: the metaserver.

D reserves blocks first and then posts where they are. The post is answered at once (202), whatever
the prefill takes; each attempt has an address of its own, so a late post of an earlier attempt can
never be taken for the present one, and a second pass always reaches P.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
from msgspec import Raw

from mooncake_proxy.errors import BadRequest, NotFound
from mooncake_proxy.http1.server import Exchange
from mooncake_proxy.openai import Fields, encode

PATH = "/v1/metaserver/"
_decoder = msgspec.json.Decoder(Fields)

# Prefills one request with the parameters that D posted.
Dispatch = Callable[[Raw], Awaitable[None]]


class Meeting:
    """One attempt that waits for D's post. Leaving the block ends the prefill it started."""

    __slots__ = ("_book", "_dispatch", "_task", "failed", "key")

    def __init__(self, book: Rendezvous, dispatch: Dispatch) -> None:
        self._book = book
        self._dispatch = dispatch
        self._task: asyncio.Task[None] | None = None
        # Not to be guessed: the metaserver has no other authentication.
        self.key = os.urandom(16).hex()
        # Gets the exception of a prefill that failed; never a result.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Meeting:
        self._book.meetings[self.key] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._book.meetings[self.key]
        if self._task is not None:
            self._task.cancel()
        if self.failed.done():
            self.failed.exception()  # seen: nothing to log at garbage collection
        else:
            self.failed.cancel()

    def start(self, params: Raw) -> None:
        """Begin the prefill; a repeated post of the same attempt changes nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(params))

    async def _run(self, params: Raw) -> None:
        """Top of the prefill task: its failure is the meeting's."""
        try:
            await self._dispatch(params)
        except Exception as error:  # noqa: BLE001  # kept, and raised by `beside`
            if not self.failed.done():
                self.failed.set_exception(error)

    async def beside(self, decoding: asyncio.Task[None]) -> None:
        """Until D is done, or the prefill failed: then D is cancelled, and that error raised."""
        try:
            await asyncio.wait({decoding, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not decoding.done():
                decoding.cancel()
                await asyncio.wait({decoding})
        if self.failed.done():
            self.failed.result()
        decoding.result()


class Rendezvous:
    """All attempts that wait for a post, by their secret key."""

    def __init__(self) -> None:
        self.meetings: dict[str, Meeting] = {}

    def expect(self, dispatch: Dispatch) -> Meeting:
        """A new meeting as a context manager."""
        return Meeting(self, dispatch)

    async def receive(self, exchange: Exchange) -> None:
        """POST /v1/metaserver/KEY: 202 at once, 404 for an attempt that is over or never was."""
        meeting = self.meetings.get(exchange.path.removeprefix(PATH))
        if meeting is None:
            raise NotFound("no such attempt: it is over, or this is not its metaserver address")
        try:
            fields = _decoder.decode(exchange.body)
        except msgspec.DecodeError as exc:
            raise BadRequest(f"metaserver wants the KV parameters as a JSON object: {exc}") from exc
        meeting.start(Raw(encode(fields)))
        exchange.respond(202, b'{"status":"accepted"}', "application/json")
