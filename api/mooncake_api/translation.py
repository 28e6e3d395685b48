"""What a form of request has to know, and how its fields are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from mooncake_api.errors import RequestRefused

Json = dict[str, Any]
encode = msgspec.json.Encoder().encode


class Translation(Protocol):
    """One request: how it reads as a chat request, and what becomes of the answer to that."""

    chat_body: bytes
    """The body for ``/v1/chat/completions``."""

    def whole(self, status: int, body: bytes) -> tuple[int, bytes]:
        """A complete answer, or an error with a status of its own; 502 for what is neither."""

    def events(self, data: bytes) -> bytes:
        """More of the chat stream, cut anywhere: the events that it comes to, none included. An
        error event ends the stream; nothing comes after it."""


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """A form of request.

    Args:
        path: that it is posted to.
        translate: reads a body; raises RequestRefused.
        error: an error in this form, from its status and the body that OpenAI's would have.
        request_type: of the body, for a schema.
        error_schema: of its errors; None for OpenAI's own.
    """

    path: str
    translate: Callable[[bytes], Translation]
    error: Callable[[int, bytes], bytes]
    request_type: type[msgspec.Struct]
    error_schema: Json | None = None


RequestType = TypeVar("RequestType", bound=msgspec.Struct)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")

NOT_HERE: Mapping[str, str] = {
    "n": "send the request several times",
    "best_of": "send the request several times",
    "echo": "use /v1/completions",
    "prompt_logprobs": "use /v1/chat/completions",
    "return_token_ids": "use /v1/chat/completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is served",
    "modalities": "only text is served",
}
"""Fields of the chat request that mean nothing in another form, and what to do instead."""


def read_request(
    body: bytes, request_type: type[RequestType], instead: Mapping[str, str]
) -> tuple[RequestType, Json]:
    """A body by its type, and the fields that the type does not have. They go with the chat
    request, which may know them (``top_k``), and whose rules for unknown fields decide otherwise.

    Args:
        instead: fields that are refused, and what to do without each.

    Raises:
        RequestRefused: no JSON object, a field of a wrong type, or one that is refused.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        request = msgspec.json.decode(body, type=request_type)
    except msgspec.ValidationError as exc:
        raise _explained(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestRefused(f"the body must be a JSON object: {exc}") from exc
    others = {}
    for name in found.keys() - set(request_type.__struct_encode_fields__):
        value = msgspec.json.decode(found[name])
        if value is None:
            continue
        if name in instead:
            raise RequestRefused(f"{name} is not served here: {instead[name]}", param=name)
        others[name] = value
    return request, others


def _explained(message: str) -> RequestRefused:
    match = _PATH.search(message)
    path = match["path"] if match else ""
    fact = message[: match.start()] if match else message
    if not path:
        return RequestRefused(f"the body must be a JSON object: {fact[0].lower()}{fact[1:]}")
    return RequestRefused(f"{path}: {fact[0].lower()}{fact[1:]}", param=path)


def event(kind: str, payload: Json) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(payload))
