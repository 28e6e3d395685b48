"""When D runs out of KV it gives a request back (`stop_reason: "recomputed"`, vLLM-Ascend).

The request then starts again at P with everything so far as its prompt: as token ids, which are
what the model saw. Text would be tokenised anew, differently, and would have to be squeezed through
the chat template a second time. The client sees one answer: one id, one usage, no finish between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from mooncake_proxy.call import Call
from mooncake_proxy.errors import MalformedAnswer, Recomputed
from mooncake_proxy.flows.relay import StreamRelay
from mooncake_proxy.openai import Answer, Endpoint, encode, parse_request
from mooncake_proxy.sse import split_events

MAX_PASSES = 8
# What OpenAI's completions generate when nobody sets a limit.
DEFAULT_MAX_TOKENS = 16
# Fields that mean nothing once the prompt is token ids.
CHAT_FIELDS = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "top_logprobs", "reasoning_effort",
}  # fmt: skip


class Record:
    """Token ids and text of one request over all its passes."""

    def __init__(self, endpoint: Endpoint, *, shows_ids: bool) -> None:
        self.endpoint = endpoint
        # Whether the client itself asked for token ids; otherwise they are taken out again.
        self.shows_ids = shows_ids
        self.prompt: list[int] = []
        self.generated: list[int] = []
        self.text = ""
        self.answer_id: str | None = None
        self.num_passes = 0
        # The client's limit of new tokens over all passes.
        self.limit: int | None = None

    def note_prefill(self, answer: Answer) -> None:
        """The prompt's ids, which only the first pass's P knows."""
        if not self.prompt and answer.choices:
            self.prompt = answer.prompt_token_ids or answer.choices[0].prompt_token_ids or []

    def take_event(self, data: bytes) -> bytes:
        """Note the ids of a chunk; gives it back as the client shall see it."""
        chunk = msgspec.json.decode(data)
        self.answer_id = self.answer_id or chunk.get("id")
        for choice in chunk.get("choices", ()):
            self._take_choice(choice)
        self._dress(chunk, "chat.completion.chunk")
        return encode(chunk)

    def take_answer(self, body: bytes, instance: str) -> bytes:
        """The same for a whole answer; Recomputed when it is none yet."""
        answer = msgspec.json.decode(body)
        [choice] = answer["choices"]
        is_chat_shaped = "message" in choice
        piece = choice["message"].get("content") if is_chat_shaped else choice.get("text")
        self.text += piece or ""
        self.answer_id = self.answer_id or answer.get("id")
        is_given_back = choice.get("stop_reason") == "recomputed"
        self._take_choice(choice)
        if is_given_back:
            raise Recomputed(instance, "gave the request back for recomputation")
        if self.endpoint is Endpoint.CHAT:
            choice.pop("text", None)
            choice["message"] = choice.get("message", {"role": "assistant"}) | {
                "content": self.text
            }
        else:
            choice["text"] = self.text
        self._dress(answer, "chat.completion")
        return encode(answer)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        self.generated += choice.get("token_ids") or []
        if not self.shows_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)

    def _dress(self, answer: dict[str, Any], chat_object: str) -> None:
        """One answer over all passes: the first id, the endpoint's own form, the whole usage."""
        if not self.shows_ids:
            answer.pop("prompt_token_ids", None)
        answer["id"] = self.answer_id
        if self.endpoint is Endpoint.CHAT and answer.get("object") == "text_completion":
            answer["object"] = chat_object
            for choice in answer["choices"]:
                if "text" in choice:
                    choice["delta"] = {"content": choice.pop("text")}
        usage = answer.get("usage")
        if usage and self.num_passes:
            usage["prompt_tokens"] = len(self.prompt)
            usage["completion_tokens"] = len(self.generated)
            usage["total_tokens"] = len(self.prompt) + len(self.generated)


class RecordingRelay(StreamRelay):
    """Reads every event for its token ids; only for instances that may give requests back."""

    __slots__ = ("_record",)

    def __init__(
        self, call: Call, instance: str, on_start: Callable[[], None], record: Record
    ) -> None:
        super().__init__(call, instance, on_start)
        self._record = record

    def _forward(self, block: bytes) -> None:
        try:
            events = [self._recorded(event, data) for event, data in split_events(block)]
        except (msgspec.DecodeError, TypeError, AttributeError) as exc:
            raise MalformedAnswer(self._instance, f"no OpenAI chunk: {exc}") from exc
        super()._forward(b"".join(events))

    def _recorded(self, event: bytes, data: bytes) -> bytes:
        if not data or data == b"[DONE]":
            return event
        return b"data: %b\n\n" % self._record.take_event(data)

    def _given_back(self, data: bytes) -> Recomputed:
        """The event that gives the request back may still carry tokens."""
        self._record.take_event(data)
        return super()._given_back(data)


def record_for(call: Call) -> Record | None:
    """A record where a recomputation could be carried out at all, else None.

    With several choices, tools or chat logprobs, token ids alone can't continue the answer.
    """
    ask = call.ask
    is_chat = call.endpoint is Endpoint.CHAT
    if (ask.n or 1) > 1 or (is_chat and {"tools", "logprobs"} & call.fields.keys()):
        return None
    return Record(call.endpoint, shows_ids=bool(ask.return_token_ids))


def next_call(call: Call, error: Recomputed) -> Call:
    """The next pass: the same request with everything so far as its prompt."""
    record = call.record
    if record is None or not record.prompt or record.num_passes >= MAX_PASSES:
        raise error
    record.num_passes += 1
    fields = {name: raw for name, raw in call.fields.items() if name not in CHAT_FIELDS}
    fields["prompt"] = Raw(encode(record.prompt + record.generated))
    fields["max_tokens"] = Raw(encode(_tokens_left(call, record)))
    body = encode(fields)
    ask, fields = parse_request(body)
    call.exchange.body = body
    return Call(
        call.exchange,
        Endpoint.COMPLETION,
        ask,
        fields,
        call.request_id,
        call.arrival,
        call.deadline,
        len(record.prompt) + len(record.generated),
        call.forward,
        attempt=call.attempt + 1,
        session=call.session,
        record=record,
    )


def _tokens_left(call: Call, record: Record) -> int | None:
    """None stands for "as many as fit", which only a chat request may ask for."""
    if record.num_passes == 1:
        record.limit = call.ask.token_limit
        if record.limit is None and record.endpoint is Endpoint.COMPLETION:
            record.limit = DEFAULT_MAX_TOKENS
    return None if record.limit is None else max(1, record.limit - len(record.generated))
