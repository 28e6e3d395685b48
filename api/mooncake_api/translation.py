"""The interface of an API format (``ApiFormat``, ``Translation``), and the decoding of its requests
with the fields that they pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from mooncake_api.errors import RequestRejected
from mooncake_api.request_body import (
    DECODE_ERRORS,
    decode_field,
    explain,
    is_float_for_integer,
    with_integers,
)

Json = dict[str, Any]
encode = msgspec.json.Encoder().encode


class Translation(Protocol):
    """The translation of one request: its chat request, and the chat response back to the client's
    format. A server creates one per request."""

    chat_body: bytes
    """The body for ``/v1/chat/completions``."""

    def complete(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Translate a complete chat response or an error; returns status and body. A body that is
        neither becomes a 502."""

    def events(self, data: bytes) -> bytes:
        """Translate more bytes of the chat stream, split anywhere; returns the resulting events,
        possibly none. After an error event, nothing more is returned."""


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """An API format.

    Args:
        path: the path to which its requests are posted.
        translate: parses a request's body; raises RequestRejected.
        error: translates an error, given its status and its body in OpenAI's format.
        request_type: the type of the body, for the OpenAPI schema.
        error_schema: the JSON schema of errors; None for OpenAI's.
    """

    path: str
    translate: Callable[[bytes], Translation]
    error: Callable[[int, bytes], bytes]
    request_type: type[msgspec.Struct]
    error_schema: Json | None = None


RequestType = TypeVar("RequestType", bound=msgspec.Struct)

UNTRANSLATED_FIELDS: Mapping[str, str] = {
    "n": "send the request several times",
    "best_of": "send the request several times",
    "echo": "use /v1/completions",
    "prompt_logprobs": "use /v1/chat/completions",
    "return_token_ids": "use /v1/chat/completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is supported",
    "modalities": "only text is supported",
}
"""Fields of chat requests that no other format supports, and what to do instead."""


def read_request(
    body: bytes, request_type: type[RequestType], instead: Mapping[str, str]
) -> tuple[RequestType, Json]:
    """Decode a body, and return it with the fields that its type does not declare. The latter are
    passed on in the chat request: its type may declare them (``top_k``), or else its rules for
    unknown fields apply.

    Args:
        body: the request's body.
        request_type: the type to decode.
        instead: fields to reject, each with what to do instead.

    Raises:
        RequestRejected: the body is not a JSON object, or a field is missing, has a wrong type or
            is rejected.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        request = msgspec.json.decode(body, type=request_type)
    except DECODE_ERRORS as exc:
        corrected = with_integers(body, request_type) if is_float_for_integer(exc) else None
        if corrected is None:
            raise explain(exc, request_type) from exc
        return read_request(corrected, request_type, instead)
    others = {}
    for name in found.keys() - set(request_type.__struct_encode_fields__):
        value = decode_field(name, found[name])
        if value is None:
            continue
        if name in instead:
            raise RequestRejected(f"{name} is not supported: {instead[name]}", param=name)
        others[name] = value
    return request, others


def content_of(texts: list[str]) -> str | list[Json]:
    """The content of a chat message with these texts. Several stay parts, which a chat template may
    lay out by itself; a server joins them otherwise."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


_BILLING = "x-anthropic-billing-header"


def without_billing_line(text: str) -> str:
    """A system text without the billing line that a coding agent puts before its instructions: it
    differs between requests, so that the prefix cache would never hit."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def event(kind: str, payload: Json) -> bytes:
    """A named server-sent event with a JSON payload."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(payload))
