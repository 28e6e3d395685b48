"""Serves a form of request that is not OpenAI's chat by the chat endpoint.

The body is translated on its way in and the response on its way out; between the two there is
nothing but a chat request.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_api import RequestRefused
from mooncake_api.api_formats import ApiFormat, Translation
from mooncake_engine.errors import EngineError, InvalidRequest
from mooncake_engine.server.generation_handler import read_body
from mooncake_engine.server.openai_protocol import to_api_error


@dataclass(frozen=True, slots=True)
class TranslatedEndpoint:
    """An ASGI application before that of ``/v1/chat/completions``.

    Args:
        api_format: what is spoken with the client.
        chat: serves the requests.
        max_body_bytes: longer bodies are not read.
    """

    api_format: ApiFormat
    chat: ASGIApp
    max_body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await read_body(Request(scope, receive), self.max_body_bytes)
            translation = self.api_format.translate(body)
        except ClientDisconnect:
            return
        except RequestRefused as exc:
            refused = InvalidRequest(str(exc), param=exc.param)
            await translated_error(self.api_format, refused)(scope, receive, send)
            return
        except InvalidRequest as exc:
            await translated_error(self.api_format, exc)(scope, receive, send)
            return
        body_message: Message = {"type": "http.request", "body": translation.chat_body}
        # Without the connection's short way for bytes of a body: all of them are translated.
        scope = {**scope, "extensions": {}}
        await self.chat(
            scope, _Replayed(body_message, receive), _TranslatingSend(translation, send)
        )


def translated_error(api_format: ApiFormat, exc: EngineError) -> Response:
    """What ``to_api_error`` says, in another form."""
    response = to_api_error(exc).response()
    body = api_format.error(response.status_code, bytes(response.body))
    headers = {name: value for name, value in response.headers.items() if name == "retry-after"}
    return Response(body, response.status_code, headers, media_type="application/json")


class _Replayed:
    """Receives one message that is already here, then what comes."""

    def __init__(self, message: Message, receive: Receive) -> None:
        self._message: Message | None = message
        self._receive = receive

    async def __call__(self) -> Message:
        """The next message."""
        message, self._message = self._message, None
        return await self._receive() if message is None else message


class _TranslatingSend:
    """Sends a chat response in the form that was asked for. The head of a complete one waits for
    its body, whose length it names."""

    def __init__(self, translation: Translation, send: Send) -> None:
        self._translation = translation
        self._send = send
        self._head: MutableMapping[str, Any] = {}
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        """Send one message of the response."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream:
                await self._send(message)
        elif self._is_stream:
            await self._send({**message, "body": self._translation.events(message["body"])})
        else:
            status, body = self._translation.whole(self._head["status"], message["body"])
            kept = [pair for pair in self._head["headers"] if pair[0] != b"content-length"]
            headers = [*kept, (b"content-length", str(len(body)).encode())]
            await self._send({**self._head, "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
