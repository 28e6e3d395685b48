"""Serves other API formats (Anthropic's messages, OpenAI's responses) through the chat endpoint.

The request body is translated to a chat request, and the chat response is translated back; the chat
endpoint sees an ordinary chat request.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_api import RequestRejected
from mooncake_api.api_formats import ApiFormat, Translation
from mooncake_engine.errors import EngineError, InvalidRequest
from mooncake_engine.server.generation_handler import read_body
from mooncake_engine.server.openai_protocol import to_api_error


@dataclass(frozen=True, slots=True)
class TranslatedEndpoint:
    """An ASGI application that wraps that of ``/v1/chat/completions``.

    Args:
        api_format: the format of the client's requests and responses.
        chat: the chat endpoint, which serves the translated requests.
        max_body_bytes: the largest request body that the server reads.
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
        except RequestRejected as exc:
            refused = InvalidRequest(str(exc), param=exc.param)
            await translated_error(self.api_format, refused)(scope, receive, send)
            return
        except InvalidRequest as exc:
            await translated_error(self.api_format, exc)(scope, receive, send)
            return
        body_message: Message = {"type": "http.request", "body": translation.chat_body}
        # Hides the connection's WRITE_CHUNK, which would bypass the translation of the body.
        scope = {**scope, "extensions": {}}
        await self.chat(
            scope, _Replayed(body_message, receive), _TranslatingSend(translation, send)
        )


def translated_error(api_format: ApiFormat, exc: EngineError) -> Response:
    """The response for an error, as ``to_api_error`` maps it, in another API format."""
    response = to_api_error(exc).response()
    body = api_format.error(response.status_code, bytes(response.body))
    kept = ("retry-after", "x-should-retry")
    headers = {name: response.headers[name] for name in kept if name in response.headers}
    return Response(body, response.status_code, headers, media_type="application/json")


class _Replayed:
    """An ASGI ``receive`` that first returns a given message, then those of the connection."""

    def __init__(self, message: Message, receive: Receive) -> None:
        self._message: Message | None = message
        self._receive = receive

    async def __call__(self) -> Message:
        """The next message."""
        message, self._message = self._message, None
        return await self._receive() if message is None else message


class _TranslatingSend:
    """An ASGI ``send`` that translates a chat response. The head of a complete response is held
    back until its body is translated, because it contains the body's length."""

    def __init__(self, translation: Translation, send: Send) -> None:
        self._translation = translation
        self._send = send
        self._head: MutableMapping[str, Any] = {}
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        """Translate and send one message of the response."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream:
                await self._send(message)
        elif self._is_stream:
            await self._send({**message, "body": self._translation.events(message["body"])})
        else:
            status, body = self._translation.complete(self._head["status"], message["body"])
            kept = [pair for pair in self._head["headers"] if pair[0] != b"content-length"]
            headers = [*kept, (b"content-length", str(len(body)).encode())]
            await self._send({**self._head, "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
