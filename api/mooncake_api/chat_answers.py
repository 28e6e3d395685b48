"""Answers to chat requests, whole and streamed, as far as other forms need them."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import Struct

from mooncake_api.translation import Json

_DONE = b"[DONE]"


class CallFunction(Struct):
    """A call, or the next piece of one."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A call of an answer; ``index`` tells a stream's calls apart."""

    function: CallFunction
    id: str | None = None
    index: int = 0


class ChatText(Struct):
    """What a message holds, or what a chunk adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        """Its reasoning, by either name."""
        return self.reasoning or self.reasoning_content or ""


class ChatLogprobs(Struct):
    """Log probabilities of the tokens of a text."""

    content: list[Json] | None = None


class ChatChoice(Struct):
    """The choice of an answer (``message``) or of a chunk (``delta``)."""

    message: ChatText | None = None
    delta: ChatText | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class CachedTokens(Struct):
    """Of a prompt."""

    cached_tokens: int | None = None


class ReasoningTokens(Struct):
    """Of an answer."""

    reasoning_tokens: int | None = None


class ChatUsage(Struct):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return (self.prompt_tokens_details or CachedTokens()).cached_tokens or 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the answer that were reasoning, where a server counts them."""
        return (self.completion_tokens_details or ReasoningTokens()).reasoning_tokens or 0


class ChatAnswer(Struct):
    """A complete answer, or a chunk of a stream."""

    choices: list[ChatChoice]
    id: str = ""
    created: int = 0
    model: str = ""
    usage: ChatUsage | None = None
    # For a router that hands a prompt from one instance to another in the form it was asked in.
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


def read_error(body: bytes) -> ChatError:
    """What an error says; its text, where it has another form."""
    try:
        return _errors.decode(body).error
    except msgspec.DecodeError:
        return ChatError(body.decode(errors="replace").strip() or "the server gave no reason")


class AnswerWriter(Protocol):
    """Writes the events of one form, told of a chat stream piece by piece."""

    def begin(self, chunk: ChatAnswer) -> bytes:
        """The first chunk has come; its texts follow."""

    def reasoning(self, text: str) -> bytes:
        """More reasoning."""

    def text(self, text: str, logprobs: list[Json]) -> bytes:
        """More of the answer."""

    def call(self, piece: ToolCall) -> bytes:
        """A call, or more of the arguments of the one that came last."""

    def finish(self, reason: str | None, stop: int | str | None, usage: ChatUsage) -> bytes:
        """The stream is whole."""

    def fail(self, error: ChatError) -> bytes:
        """The stream ends with an error."""


class ChatStreamReader:
    """Takes a chat stream apart, however it is cut, and tells a writer.

    Args:
        writer: of the events that come out.
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
        """The events that these bytes of the stream complete."""
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
        """A stream that ends before it began has a beginning, too."""
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
    """Tell a writer of a complete answer; False, and nothing told, for a body that is none."""
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
    """Tell a writer of a message, or of what a chunk adds to one."""
    written = b""
    if text.thought:
        written += writer.reasoning(text.thought)
    entries: list[Any] = (logprobs.content if logprobs else None) or []
    if text.content or entries:
        written += writer.text(text.content or "", entries)
    for piece in text.tool_calls or ():
        written += writer.call(piece)
    return written
