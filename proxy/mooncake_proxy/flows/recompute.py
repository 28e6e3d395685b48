"""When D runs out of KV it gives a request back (`stop_reason: "recomputed"`, vLLM-Ascend).

The request then starts again at P with everything so far as its prompt: as token ids, which are
what the model saw. Text would be tokenised anew, differently, and would have to be squeezed through
the chat template a second time. The client sees one answer: one id, one usage, no finish between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
from msgspec import Raw

from mooncake_proxy.call import Call
from mooncake_proxy.errors import MalformedAnswer, Recomputed
from mooncake_proxy.flows.relay import StreamRelay
from mooncake_proxy.openai import Endpoint, encode, parse_request
from mooncake_proxy.record import Record
from mooncake_proxy.router import Router
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


async def in_passes(
    router: Router, call: Call, one_pass: Callable[[Router, Call], Awaitable[None]]
) -> None:
    """Prefill and decode until the answer is whole, where instances may give requests back."""
    call.record = record_for(call)
    while True:
        try:
            await one_pass(router, call)
        except Recomputed as error:
            call = next_call(call, error)
            router.metrics.recomputed.add()
        else:
            return


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
    if record is None or record.num_passes >= MAX_PASSES:
        raise error
    record.num_passes += 1
    if not record.generated and not call.is_committed:
        return replace(call, attempt=call.attempt + 1)
    if not record.prompt:
        raise error
    fields = {name: raw for name, raw in call.fields.items() if name not in CHAT_FIELDS}
    fields["prompt"] = Raw(encode(record.prompt + record.generated))
    fields["max_tokens"] = Raw(encode(_tokens_left(call, record)))
    body = encode(fields)
    ask, fields = parse_request(body)
    call.exchange.body = body
    return replace(
        call,
        endpoint=Endpoint.COMPLETION,
        ask=ask,
        fields=fields,
        prompt_tokens=len(record.prompt) + len(record.generated),
        attempt=call.attempt + 1,
        is_committed=False,
        prefix_blocks=(),
        cached_tokens=None,
    )


def _tokens_left(call: Call, record: Record) -> int | None:
    """None stands for "as many as fit", which only a chat request may ask for."""
    if record.limit is None:
        record.limit = call.ask.token_limit
        if record.limit is None and record.endpoint is Endpoint.COMPLETION:
            record.limit = DEFAULT_MAX_TOKENS
    return None if record.limit is None else max(1, record.limit - len(record.generated))
