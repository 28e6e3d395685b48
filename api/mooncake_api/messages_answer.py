"""Responses of ``/v1/messages``, complete and streamed, and errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_api import MESSAGES_PATH
from mooncake_api.chat_answers import (
    ChatAnswer,
    ChatError,
    ChatStreamReader,
    ChatUsage,
    ToolCall,
    read_error,
    write_answer,
)
from mooncake_api.messages_request import MessagesRequest, read_messages_request
from mooncake_api.translation import ApiFormat, Json, encode, event

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields of chat requests that have another name here."""
_ERROR_SCHEMA: Json = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def messages_error(status: int, body: bytes) -> bytes:
    """An error in Anthropic's format, from a body in OpenAI's format."""
    return encode(_error(status, read_error(body, _NAMES)))


class MessagesTranslation:
    """The ``Translation`` of one request to ``/v1/messages``."""

    def __init__(self, body: bytes) -> None:
        request, self.chat_body = read_messages_request(body)
        self._writer = _MessageWriter(request)
        self._reader = ChatStreamReader(self._writer)

    def complete(self, status: int, body: bytes) -> tuple[int, bytes]:
        if status != 200:
            return status, messages_error(status, body)
        if not write_answer(self._writer, body):
            message = "the instance did not return a chat completion"
            return 502, encode(_error(502, ChatError(message)))
        return 200, encode(self._writer.complete())

    def events(self, data: bytes) -> bytes:
        return self._reader.feed(data)


MESSAGES = ApiFormat(
    MESSAGES_PATH, MessagesTranslation, messages_error, MessagesRequest, _ERROR_SCHEMA
)


class _MessageWriter:
    """The ``AnswerWriter`` of one request: builds the message and its events."""

    def __init__(self, request: MessagesRequest) -> None:
        self._message: Json = {
            "id": "",
            "type": "message",
            "role": "assistant",
            "model": request.model or "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(ChatUsage()),
        }
        # The JSON text of each call's arguments, by block; decoded when the message is complete.
        self._arguments: dict[int, str] = {}
        self._has_open_block = False
        # The parts of the open block's text; joined once when the block closes.
        self._pieces: list[str] = []

    def begin(self, chunk: ChatAnswer) -> bytes:
        """Start the message. Its id is that of the chat answer with another prefix."""
        self._message["id"] = "msg_" + chunk.id.rpartition("chatcmpl-")[2]
        self._message["model"] = chunk.model or self._message["model"]
        self._message["usage"] = _usage(chunk.usage or ChatUsage())
        if chunk.kv_transfer_params is not None:
            self._message["kv_transfer_params"] = chunk.kv_transfer_params
        return _event("message_start", message=self._message)

    def reasoning(self, text: str) -> bytes:
        """Append to the thinking block; opens one if none is open."""
        written = b""
        if not self._is_open("thinking"):
            written = self._open({"type": "thinking", "thinking": "", "signature": ""})
        self._pieces.append(text)
        return written + self._delta(type="thinking_delta", thinking=text)

    def text(self, text: str, logprobs: list[Json]) -> bytes:
        """Append to the text block; opens one if none is open."""
        written = b"" if self._is_open("text") else self._open({"type": "text", "text": ""})
        self._pieces.append(text)
        return written + self._delta(type="text_delta", text=text)

    def call(self, piece: ToolCall) -> bytes:
        """Open a call if the delta has a name; append its arguments to the open call."""
        written = b""
        if piece.function.name is not None:
            call_id = piece.id or f"toolu_{self._message['id']}_{len(self._message['content'])}"
            call = {"type": "tool_use", "id": call_id, "name": piece.function.name, "input": {}}
            written = self._open(call)
            self._arguments[self._index] = ""
        arguments = piece.function.arguments
        if arguments and self._is_open("tool_use"):
            self._pieces.append(arguments)
            written += self._delta(type="input_json_delta", partial_json=arguments)
        return written

    def finish(self, reason: str | None, stop: int | str | None, usage: ChatUsage) -> bytes:
        """Complete the message, which may have been cut at its token limit."""
        written = self._close()
        ending: Json = {"stop_reason": _STOP_REASONS.get(reason or "", "end_turn")}
        ending["stop_sequence"] = stop if isinstance(stop, str) else None
        if ending["stop_sequence"] is not None and ending["stop_reason"] == "end_turn":
            ending["stop_reason"] = "stop_sequence"
        self._message |= ending | {"usage": _usage(usage)}
        written += _event("message_delta", delta=ending, usage=self._message["usage"])
        return written + _event("message_stop")

    def fail(self, error: ChatError) -> bytes:
        """End the stream with an error event."""
        status = error.code if isinstance(error.code, int) else 500
        return event("error", _error(429 if error.code == "overloaded" else status, error))

    def complete(self) -> Json:
        """The complete message, with the arguments of its calls decoded. Truncated arguments become
        an empty object."""
        for index, arguments in self._arguments.items():
            try:
                found = msgspec.json.decode(arguments or "{}")
            except msgspec.DecodeError:
                found = None
            self._message["content"][index]["input"] = found if isinstance(found, dict) else {}
        return self._message

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1

    @property
    def _block(self) -> Json:
        block: Json = self._message["content"][-1]
        return block

    def _is_open(self, kind: str) -> bool:
        return self._has_open_block and self._block["type"] == kind

    def _open(self, block: Json) -> bytes:
        written = self._close()
        self._message["content"].append(block)
        self._has_open_block = True
        return written + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if not self._has_open_block:
            return b""
        self._has_open_block = False
        whole, kind = "".join(self._pieces), self._block["type"]
        self._pieces.clear()
        if kind == "tool_use":
            self._arguments[self._index] = whole
        else:
            self._block[kind] = whole
        written = b""
        if self._block["type"] == "thinking":
            # Clients send back only thinking with a signature; its value is up to the server.
            self._block["signature"] = self._message["id"]
            written = self._delta(type="signature_delta", signature=self._message["id"])
        return written + _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event(kind, {"type": kind, **fields})


def _error(status: int, error: ChatError) -> Json:
    kind = _KINDS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _usage(usage: ChatUsage) -> Json:
    """The usage in Anthropic's format, where input tokens exclude cached ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
