"""The metaserver of push and early pull: D posts where its blocks are, which starts the prefill.

The post is answered 202 immediately, not after the prefill. Each attempt has its own URL, so that a
late post of an earlier attempt can't be mistaken for one of the current attempt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
from msgspec import Raw

from mooncake_proxy.api.openai_bodies import Fields, encode
from mooncake_proxy.errors import DECODE_ERRORS, BadRequest, NotFound
from mooncake_proxy.http1.http_request import HttpRequest

PATH = "/v1/metaserver/"
_decoder = msgspec.json.Decoder(Fields)

# Runs the prefill of one request with the parameters that D posted.
Dispatch = Callable[[Raw], Awaitable[None]]


class MetaserverSession:
    """One attempt: waits for D's post, then runs the prefill. Leaving the block cancels it."""

    __slots__ = ("_dispatch_prefill", "_metaserver", "_task", "failed", "key")

    def __init__(self, metaserver: Metaserver, dispatch: Dispatch) -> None:
        self._metaserver = metaserver
        self._dispatch_prefill = dispatch
        self._task: asyncio.Task[None] | None = None
        # Random and secret: the metaserver has no other authentication.
        self.key = os.urandom(16).hex()
        # Gets the exception of a failed prefill; never a result.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> MetaserverSession:
        self._metaserver.sessions[self.key] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._metaserver.sessions[self.key]
        if self._task is not None:
            self._task.cancel()
        if self.failed.done():
            self.failed.exception()  # mark as retrieved, or asyncio logs it at garbage collection
        else:
            self.failed.cancel()

    def start(self, params: Raw) -> None:
        """Start the prefill. Idempotent: D may repeat its post."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(params))

    async def _run(self, params: Raw) -> None:
        """Run the prefill task, and store its exception in `failed`."""
        try:
            await self._dispatch_prefill(params)
        except Exception as error:  # noqa: BLE001  # kept; raised by `supervise_decode`
            if not self.failed.done():
                self.failed.set_exception(error)

    async def supervise_decode(self, decoding: asyncio.Task[None]) -> None:
        """Wait for D. If the prefill fails first, cancel D and raise the prefill's error.

        Once the client has D's answer, the prefill's error no longer counts.
        """
        try:
            await asyncio.wait({decoding, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not decoding.done():
                decoding.cancel()
                await asyncio.wait({decoding})
        is_answered = not decoding.cancelled() and decoding.exception() is None
        if self.failed.done() and not is_answered:
            self.failed.result()
        decoding.result()


class Metaserver:
    """All open sessions of this process, by their secret key."""

    def __init__(self) -> None:
        self.sessions: dict[str, MetaserverSession] = {}
        # URL at which decode instances reach it; set once this process listens.
        self._url = ""

    def set_own_url(self, url: str) -> None:
        """Set the address at which decode instances reach this process."""
        self._url = url.rstrip("/") + PATH

    @property
    def is_reachable(self) -> bool:
        """Whether the URL has been set."""
        return bool(self._url)

    def url_of(self, session: MetaserverSession) -> str:
        """The URL that D posts to for this attempt."""
        return self._url + session.key

    def expect(self, dispatch: Dispatch) -> MetaserverSession:
        """A new session, as a context manager."""
        return MetaserverSession(self, dispatch)

    def is_open(self, path: str) -> bool:
        """Whether an attempt waits for a post to this path."""
        return path.removeprefix(PATH) in self.sessions

    async def receive(self, request: HttpRequest) -> None:
        """POST /v1/metaserver/KEY: 202 immediately, or 404 if there is no such open attempt."""
        session = self.sessions.get(request.path.removeprefix(PATH))
        if session is None:
            raise NotFound("no such attempt: it is over, or this is not its metaserver address")
        try:
            fields = _decoder.decode(request.body)
        except DECODE_ERRORS as exc:
            raise BadRequest(f"metaserver wants the KV parameters as a JSON object: {exc}") from exc
        session.start(Raw(encode(fields)))
        request.respond(202, b'{"status":"accepted"}', "application/json")
