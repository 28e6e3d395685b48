"""Parses chat responses, complete and streamed, and replays them to the ``AnswerWriter`` of another
format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mooncake_api.translation import Json

_DONE = b"[DONE]"


class CallFunction(Struct):
    """The function of a call, or the next part of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A tool call of an answer; ``index`` identifies the call within a stream."""

    function: CallFunction
    id: str | None = None
    index: int = 0


class ChatText(Struct):
    """The content of a message, or the delta that a chunk adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        """The reasoning, under either of its field names."""
        return self.reasoning or self.reasoning_content or ""


class ChatLogprobs(Struct):
    """The log probabilities of a text's tokens."""

    content: list[Json] | None = None


class ChatChoice(Struct):
    """A choice of a complete answer (``message``) or of a chunk (``delta``)."""

    message: ChatText | None = None
    delta: ChatText | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class CachedTokens(Struct):
    """``prompt_tokens_details`` of the usage."""

    cached_tokens: int | None = None


class ReasoningTokens(Struct):
    """``completion_tokens_details`` of the usage."""

    reasoning_tokens: int | None = None


class ChatUsage(Struct):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was cached."""
        return (self.prompt_tokens_details or CachedTokens()).cached_tokens or 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of the answer; 0 where the server does not count them."""
        return (self.completion_tokens_details or ReasoningTokens()).reasoning_tokens or 0


class ChatAnswer(Struct):
    """A complete answer, or a chunk of a stream."""

    choices: list[ChatChoice]
    id: str = ""
    created: int = 0
    model: str = ""
    usage: ChatUsage | None = None
    # Passed through for routers that move a request between instances in the client's format.
    kv_transfer_params: Json | None = None


class ChatError(Struct):
    """OpenAI's error object."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(Struct):
    error: ChatError


_answers = msgspec.json.Decoder(ChatAnswer)
_errors = msgspec.json.Decoder(_ErrorBody)


def read_error(body: bytes, names: Mapping[str, str] = MappingProxyType({})) -> ChatError:
    """The error in a response's body. A body of another format becomes the error's message.

    Args:
        names: fields of chat requests that have another name in the client's format. An error that
            names one, as its ``param`` and at the beginning of its message, gets the other.
    """
    try:
        error = _errors.decode(body).error
    except msgspec.DecodeError:
        return ChatError(body.decode(errors="replace").strip() or "the server gave no reason")
    param = error.param or ""
    if param not in names:
        return error
    message = error.message
    if message.startswith(param):
        message = names[param] + message[len(param) :]
    return replace(error, param=names[param], message=message)


class AnswerWriter(Protocol):
    """Builds a response of one format from the parts of a chat stream. Each method returns the
    events that the part results in."""

    def begin(self, chunk: ChatAnswer) -> bytes:
        """Start the response with the first chunk; calls for the chunk's content follow."""

    def reasoning(self, text: str) -> bytes:
        """Append reasoning."""

    def text(self, text: str, logprobs: list[Json]) -> bytes:
        """Append text of the answer; empty for log probabilities whose tokens have none yet."""

    def call(self, piece: ToolCall) -> bytes:
        """Start a tool call, or append arguments to the last one."""

    def finish(self, reason: str | None, stop: int | str | None, usage: ChatUsage) -> bytes:
        """Complete the response."""

    def fail(self, error: ChatError) -> bytes:
        """End the response with an error."""


class ChatStreamReader:
    """Parses a chat stream, however it is split, and passes its parts to a writer.

    Args:
        writer: builds the response and its events.
    """

    def __init__(self, writer: AnswerWriter) -> None:
        self._writer = writer
        self._tail = b""
        self._has_begun = False
        self._is_over = False
        self._reason: str | None = None
        self._stop: int | str | None = None
        self._usage = ChatUsage()

    def feed(self, data: bytes) -> bytes:
        """Parse more bytes of the stream; returns the resulting events."""
        *whole, self._tail = (self._tail + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return b"".join(map(self._event, whole))

    def _event(self, lines: bytes) -> bytes:
        values = [line[5:].strip() for line in lines.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(values)
        if self._is_over or not data:
            return b""
        if data == _DONE:
            self._is_over = True
            return self._opening() + self._writer.finish(self._reason, self._stop, self._usage)
        try:
            return self._chunk(_answers.decode(data))
        except msgspec.DecodeError:
            self._is_over = True
            return self._opening() + self._writer.fail(read_error(data))

    def _opening(self) -> bytes:
        """Start the response if no chunk has; a stream that ends without a chunk needs its opening
        events, too."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._writer.begin(ChatAnswer([], usage=self._usage))

    def _chunk(self, chunk: ChatAnswer) -> bytes:
        if chunk.usage is not None:
            self._usage = chunk.usage
        written = b""
        if not self._has_begun:
            self._has_begun = True
            written = self._writer.begin(chunk)
        for choice in chunk.choices[:1]:
            if choice.finish_reason is not None:
                self._reason, self._stop = choice.finish_reason, choice.stop_reason
            if choice.delta is not None:
                written += _write_text(self._writer, choice.delta, choice.logprobs)
        return written


def write_answer(writer: AnswerWriter, body: bytes) -> bool:
    """Pass a complete answer to a writer. Returns False, and passes nothing, if the body is no
    chat completion."""
    try:
        answer = _answers.decode(body)
    except msgspec.DecodeError:
        return False
    for choice in answer.choices[:1]:
        if choice.message is not None:
            writer.begin(answer)
            _write_text(writer, choice.message, choice.logprobs)
            writer.finish(choice.finish_reason, choice.stop_reason, answer.usage or ChatUsage())
            return True
    return False


def _write_text(writer: AnswerWriter, text: ChatText, logprobs: ChatLogprobs | None) -> bytes:
    """Pass a message, or the delta of a chunk, to a writer."""
    written = b""
    if text.thought:
        written += writer.reasoning(text.thought)
    entries: list[Any] = (logprobs.content if logprobs else None) or []
    # Beside reasoning or calls alone, they are those of its tokens.
    if text.content or (entries and not (text.thought or text.tool_calls)):
        written += writer.text(text.content or "", entries)
    for piece in text.tool_calls or ():
        written += writer.call(piece)
    return written
