"""Responses of ``/v1/responses``, complete and streamed."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_api import RESPONSES_PATH
from mooncake_api.chat_answers import (
    ChatAnswer,
    ChatError,
    ChatStreamReader,
    ChatUsage,
    ToolCall,
    read_error,
    write_answer,
)
from mooncake_api.responses_request import (
    ResponsesRequest,
    namespaces,
    read_responses_request,
    wants_logprobs,
)
from mooncake_api.translation import ApiFormat, Json, encode, event

_NO_ANSWER = (
    b'{"error":{"message":"the instance did not return a chat completion","type":"server_error"}}'
)

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat requests that have another name here."""
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "temperature", "top_p"),
    *("top_logprobs", "user", "safety_identifier", "prompt_cache_key"),
)


def responses_error(_status: int, body: bytes) -> bytes:
    """An error of a chat request, which has OpenAI's format already, with this form's fields."""
    error = read_error(body)
    if error.param not in _NAMES:
        return body
    return encode({"error": read_error(body, _NAMES)})


class ResponsesTranslation:
    """The ``Translation`` of one request to ``/v1/responses``."""

    def __init__(self, body: bytes) -> None:
        request, self.chat_body = read_responses_request(body)
        self._writer = _ResponseWriter(request)
        self._reader = ChatStreamReader(self._writer)

    def complete(self, status: int, body: bytes) -> tuple[int, bytes]:
        if status != 200:
            return status, responses_error(status, body)
        if not write_answer(self._writer, body):
            return 502, _NO_ANSWER
        return 200, encode(self._writer.response)

    def events(self, data: bytes) -> bytes:
        return self._reader.feed(data)


RESPONSES = ApiFormat(RESPONSES_PATH, ResponsesTranslation, responses_error, ResponsesRequest)


class _ResponseWriter:
    """The ``AnswerWriter`` of one request: builds the response and its events."""

    def __init__(self, request: ResponsesRequest) -> None:
        self.response = _empty_response(request)
        self._shows_logprobs = wants_logprobs(request)
        self._namespaces = namespaces(request)
        self._num_events = 0
        self._suffix = ""
        self._has_open_item = False
        # Log probabilities of tokens without text since the last piece of the answer: the next
        # text completes them, as that of a character's first bytes.
        self._waiting_logprobs: list[Json] = []
        # The parts of the open item's text; joined once when the item closes.
        self._pieces: list[str] = []

    def begin(self, chunk: ChatAnswer) -> bytes:
        """Start the response. Its id is that of the chat answer with another prefix."""
        self._suffix = chunk.id.rpartition("chatcmpl-")[2]
        self.response["id"] = f"resp_{self._suffix}"
        self.response["created_at"] = chunk.created
        self.response["model"] = chunk.model or self.response["model"]
        if chunk.kv_transfer_params is not None:
            self.response["kv_transfer_params"] = chunk.kv_transfer_params
        events = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self.response) for kind in events)

    def reasoning(self, text: str) -> bytes:
        """Append to the reasoning item; opens one if none is open."""
        written = b""
        self._waiting_logprobs.clear()
        if not self._is_open("reasoning"):
            item: Json = {"id": self._item_id("rs"), "type": "reasoning", "summary": []}
            written = self._close() + self._open(item | {"status": "in_progress", "content": []})
            written += self._open_part({"type": "reasoning_text", "text": ""})
        self._pieces.append(text)
        return written + self._item_event("response.reasoning_text.delta", delta=text, is_part=True)

    def text(self, text: str, logprobs: list[Json]) -> bytes:
        """Append to the message; a text opens one if none is open."""
        shown = logprobs if self._shows_logprobs else []
        if not text and not self._is_open("message"):
            self._waiting_logprobs += shown
            return b""
        written = b"" if self._is_open("message") else self._open_message()
        shown = self._waiting_logprobs + shown
        self._waiting_logprobs = []
        self._pieces.append(text)
        self._part["logprobs"] += shown
        kind = "response.output_text.delta"
        return written + self._item_event(kind, delta=text, logprobs=shown, is_part=True)

    def call(self, piece: ToolCall) -> bytes:
        """Open a call if the delta has a name; append its arguments to the open call."""
        written = b""
        self._waiting_logprobs.clear()
        if piece.function.name is not None:
            call_id = piece.id or self._item_id("call")
            item: Json = {"id": self._item_id("fc"), "type": "function_call", "call_id": call_id}
            item |= {"name": piece.function.name, "arguments": "", "status": "in_progress"}
            if piece.function.name in self._namespaces:
                item["namespace"], item["name"] = self._namespaces[piece.function.name]
            written = self._close() + self._open(item)
        arguments = piece.function.arguments
        if arguments and self._is_open("function_call"):
            self._pieces.append(arguments)
            written += self._item_event("response.function_call_arguments.delta", delta=arguments)
        return written

    def finish(self, reason: str | None, stop: int | str | None, usage: ChatUsage) -> bytes:
        """Complete the response, which may have been cut at its token limit."""
        written = b""
        if not self.response["output"]:
            written = self._open_message()
            self._part["logprobs"] += self._waiting_logprobs
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed"
        written += self._close(status)
        self.response |= {"status": status, "usage": _usage(usage)}
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = self.response["created_at"]
        return written + self._event(f"response.{status}", response=self.response)

    def fail(self, error: ChatError) -> bytes:
        """End the response with an error, with the output so far."""
        code = "rate_limit_exceeded" if error.code in (429, "overloaded") else "server_error"
        self._settle()
        failure = {"code": code, "message": error.message}
        self.response |= {"status": "failed", "error": failure}
        return self._event("response.failed", response=self.response)

    @property
    def _item(self) -> Json:
        item: Json = self.response["output"][-1]
        return item

    @property
    def _part(self) -> Json:
        part: Json = self._item["content"][-1]
        return part

    def _is_open(self, kind: str) -> bool:
        return self._has_open_item and self._item["type"] == kind

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.response['output'])}"

    def _open_message(self) -> bytes:
        item: Json = {"id": self._item_id("msg"), "type": "message", "role": "assistant"}
        written = self._close() + self._open(item | {"status": "in_progress", "content": []})
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return written + self._open_part(part)

    def _open(self, item: Json) -> bytes:
        self.response["output"].append(item)
        self._has_open_item = True
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _open_part(self, part: Json) -> bytes:
        self._item["content"].append(part)
        return self._item_event("response.content_part.added", part=part, is_part=True)

    def _close(self, status: str = "completed") -> bytes:
        """Close the open item, if any: events for its whole text, its part and the item."""
        if not self._has_open_item:
            return b""
        self._settle()
        self._has_open_item = False
        item = self._item
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            written = self._item_event("response.function_call_arguments.done", **whole)
        else:
            written = self._close_part()
        done = self._event("response.output_item.done", output_index=self._index, item=item)
        return written + done

    def _settle(self) -> None:
        """Join the text received so far into the open item."""
        if self._pieces:
            whole = "".join(self._pieces)
            if self._is_open("function_call"):
                self._item["arguments"] = whole
            else:
                self._part["text"] = whole
            self._pieces.clear()

    def _close_part(self) -> bytes:
        part = self._part
        if part["type"] == "reasoning_text":
            kind, more = "response.reasoning_text.done", {}
        else:
            kind, more = "response.output_text.done", {"logprobs": part["logprobs"]}
        written = self._item_event(kind, text=part["text"], is_part=True, **more)
        return written + self._item_event("response.content_part.done", part=part, is_part=True)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _item_event(self, kind: str, *, is_part: bool = False, **fields: Any) -> bytes:
        """An event of the open item, or of its only part where ``is_part``."""
        where: Json = {"item_id": self._item["id"], "output_index": self._index}
        if is_part:
            where["content_index"] = 0
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        numbered: Json = {"type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return event(kind, numbered | fields)


def _empty_response(request: ResponsesRequest) -> Json:
    """The initial response: the request's parameters with their defaults, and no output."""
    asked = msgspec.to_builtins(request)
    text = {name: value for name, value in (asked["text"] or {}).items() if value is not None}
    text["format"] = _without_nulls(text.get("format") or {"type": "text"})
    is_parallel = request.parallel_tool_calls is not False
    return {
        "id": "",
        "object": "response",
        "created_at": 0,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model or "",
        "output": [],
        "parallel_tool_calls": is_parallel,
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None} | tool for tool in request.tools or ()],
        "text": text,
        "reasoning": {"effort": None, "summary": None} | _without_nulls(asked["reasoning"] or {}),
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": request.truncation or "disabled",
        "usage": None,
        **{name: asked[name] for name in _ECHOED},
    }


def _without_nulls(found: Json) -> Json:
    return {name: value for name, value in found.items() if value is not None}


def _usage(usage: ChatUsage) -> Json:
    cached = {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
