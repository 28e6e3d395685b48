"""How answers look on the wire: the forms of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from mooncake_engine.messages import FinishReason
from mooncake_engine.server.jobs import Echo, Job
from mooncake_engine.server.logprobs import (
    TokenBytes,
    after_first_token,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from mooncake_engine.server.tools import call_deltas, call_prefix, whole_calls
from mooncake_engine.text.answers import Answer
from mooncake_engine.text.generation import TextUpdate

_MARK = "\x00"
_ENCODED_MARK = msgspec.json.encode(_MARK)
DONE = b"data: [DONE]\n\n"
"""The event that ends a stream in good order."""


class Form(Protocol):
    """One endpoint's wire form. Everything is plain data; ``sse`` and ``frame`` encode it."""

    object_name: str
    chunk_object_name: str

    def api_id(self, job: Job) -> str:
        """The answer's ``id``."""

    def opening(self, job: Job, index: int) -> dict[str, Any] | None:
        """The choice of a chunk that precedes the text, if the form has one."""

    def plain_delta(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk that holds text and nothing else."""

    def delta(self, job: Job, index: int, update: TextUpdate, *, is_first: bool) -> dict[str, Any]:
        """The choice of a chunk in full; the first one of an answer holds its echo."""

    def choice(self, job: Job, index: int, answer: Answer) -> dict[str, Any]:
        """A whole answer."""

    def beside_choices(self, job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
        """What a whole answer has at its top level."""


class CompletionForm:
    """``/v1/completions``."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def api_id(self, job: Job) -> str:
        return f"cmpl-{job.request_id}"

    def opening(self, job: Job, index: int) -> dict[str, Any] | None:
        return None

    def plain_delta(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def delta(self, job: Job, index: int, update: TextUpdate, *, is_first: bool) -> dict[str, Any]:
        return self._choice(job, index, update, is_first=is_first)

    def choice(self, job: Job, index: int, answer: Answer) -> dict[str, Any]:
        choice = self._choice(job, index, answer, is_first=True)
        if job.returns_token_ids:
            choice["prompt_token_ids"] = job.prompt_of(index).token_ids
        if job.shows_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._token_bytes)
        return choice

    def beside_choices(self, job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
        return {}

    def _choice(
        self, job: Job, index: int, answer: TextUpdate | Answer, *, is_first: bool
    ) -> dict[str, Any]:
        echo = job.echo_of(index)
        choice = self.plain_delta(index, answer.text)
        if echo is not None and is_first:
            choice["text"] = echo.text + answer.text
        choice["finish_reason"] = answer.finish
        choice["stop_reason"] = answer.stop_reason
        if job.wants_logprobs:
            choice["logprobs"] = self._logprobs(answer, echo, is_first=is_first)
        if job.returns_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _logprobs(
        self, answer: TextUpdate | Answer, echo: Echo | None, *, is_first: bool
    ) -> dict[str, Any]:
        if echo is None:
            return completion_logprobs(answer.logprobs, answer.text_offsets, self._token_bytes)
        offsets = [len(echo.text) + offset for offset in answer.text_offsets]
        if not is_first:
            return completion_logprobs(answer.logprobs, offsets, self._token_bytes)
        entries = [*answer.prompt_logprobs, *answer.logprobs]
        lists = completion_logprobs(entries, [*echo.offsets, *offsets], self._token_bytes)
        return after_first_token(lists, self._token_bytes(echo.first_token_id))


class ChatForm:
    """``/v1/chat/completions``."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def api_id(self, job: Job) -> str:
        return f"chatcmpl-{job.request_id}"

    def opening(self, job: Job, index: int) -> dict[str, Any] | None:
        if job.handover.is_first_delivered:
            return None
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def plain_delta(self, index: int, text: str) -> dict[str, Any]:
        delta = {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, job: Job, index: int, update: TextUpdate, *, is_first: bool) -> dict[str, Any]:
        choice = self.plain_delta(index, update.text)
        if update.calls:
            calls = call_deltas(call_prefix(job.request_id, index), update)
            content = {"content": update.text} if update.text else {}
            choice["delta"] = content | {"tool_calls": calls}
        return self._complete(choice, job, index, update)

    def choice(self, job: Job, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = whole_calls(call_prefix(job.request_id, index), answer)
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
        if job.returns_token_ids:
            choice["prompt_token_ids"] = job.prompt_of(index).token_ids
        return self._complete(choice, job, index, answer)

    def beside_choices(self, job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
        if not job.shows_prompt_logprobs:
            return {}
        entries = answers[0].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(entries, self._token_bytes)}

    def _complete(
        self, choice: dict[str, Any], job: Job, index: int, answer: TextUpdate | Answer
    ) -> dict[str, Any]:
        choice["finish_reason"] = answer.finish
        if answer.ends_with_calls and answer.finish is FinishReason.STOP:
            choice["finish_reason"] = "tool_calls"
        if answer.finish is not None:
            choice["stop_reason"] = answer.stop_reason
        if job.wants_logprobs:
            choice["logprobs"] = chat_logprobs(answer.logprobs, self._token_bytes)
        if job.returns_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice


class ChunkFrame:
    """One answer's chunks in two halves that never change, encoded once.

    A streamed token costs one JSON string between two ready byte strings.
    """

    def __init__(self, form: Form, job: Job, index: int) -> None:
        choice = form.plain_delta(index, _MARK)
        self._head, _, self._tail = sse(chunk(form, job, [choice])).rpartition(_ENCODED_MARK)

    def encode(self, text: str) -> bytes:
        """The event that adds ``text`` to the answer."""
        return self._head + msgspec.json.encode(text) + self._tail


def chunk(form: Form, job: Job, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A chunk of a streamed answer; ``usage`` is there, if only as null, when it is asked for."""
    if job.includes_usage:
        more.setdefault("usage", None)
    return {
        "id": form.api_id(job),
        "object": form.chunk_object_name,
        "created": job.created,
        "model": job.model,
        "choices": choices,
        **more,
    }


def sse(payload: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
