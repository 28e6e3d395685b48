"""When D runs out of KV it gives a request back (`stop_reason: "recomputed"`, vLLM-Ascend).

The request then starts again at P with everything so far as its prompt: as token ids, which are
what the model saw. Text would be tokenised anew, differently, and would have to be squeezed through
the chat template a second time. The client sees one answer: one id, one usage, no finish between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from mooncake_proxy.api.openai_bodies import (
    CompletionResponse,
    OpenAIEndpoint,
    encode,
    parse_request,
)
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import MalformedAnswer, Recomputed
from mooncake_proxy.flows.stream_forwarder import StreamForwarder
from mooncake_proxy.http1.sse import split_events
from mooncake_proxy.routing.router import RequestRouter


class TokenRecord:
    """Token ids and text of one request over all its passes."""

    def __init__(self, endpoint: OpenAIEndpoint, *, shows_ids: bool) -> None:
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

    def note_prefill(self, answer: CompletionResponse) -> None:
        """Note the prompt's token ids from the first pass's P or D."""
        if not self.prompt and answer.choices:
            self.prompt = answer.prompt_token_ids or answer.choices[0].prompt_token_ids or []

    def take_event(self, data: bytes) -> bytes:
        """Note the token ids of a chunk; returns the chunk for the client."""
        chunk = msgspec.json.decode(data)
        self.answer_id = self.answer_id or chunk.get("id")
        for choice in chunk.get("choices", ()):
            self._take_choice(chunk, choice)
        self._normalize(chunk, "chat.completion.chunk")
        return encode(chunk)

    def take_answer(self, body: bytes, instance: str) -> bytes:
        """The same for a whole answer; Recomputed when D gave the request back."""
        answer = msgspec.json.decode(body)
        [choice] = answer["choices"]
        is_chat_shaped = "message" in choice
        piece = choice["message"].get("content") if is_chat_shaped else choice.get("text")
        self.text += piece or ""
        self.answer_id = self.answer_id or answer.get("id")
        is_given_back = choice.get("stop_reason") == "recomputed"
        self._take_choice(answer, choice)
        if is_given_back:
            raise Recomputed(instance, "gave the request back for recomputation")
        if self.endpoint is OpenAIEndpoint.CHAT:
            choice.pop("text", None)
            choice["message"] = choice.get("message", {"role": "assistant"}) | {
                "content": self.text
            }
        else:
            choice["text"] = self.text
        self._normalize(answer, "chat.completion")
        return encode(answer)

    def _take_choice(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        if not self.prompt:
            whole = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            self.prompt = whole or []
        self.generated += choice.get("token_ids") or []
        if not self.shows_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)

    def _normalize(self, answer: dict[str, Any], chat_object: str) -> None:
        """Make all passes one answer: the first id, the endpoint's own form, the total usage."""
        if not self.shows_ids:
            answer.pop("prompt_token_ids", None)
        answer["id"] = self.answer_id
        if self.endpoint is OpenAIEndpoint.CHAT and answer.get("object") == "text_completion":
            answer["object"] = chat_object
            for choice in answer["choices"]:
                if "text" in choice:
                    choice["delta"] = {"content": choice.pop("text")}
        usage = answer.get("usage")
        if usage and self.num_passes and self.prompt:
            usage["prompt_tokens"] = len(self.prompt)
            usage["completion_tokens"] = len(self.generated)
            usage["total_tokens"] = len(self.prompt) + len(self.generated)


MAX_PASSES = 8
# What OpenAI's completions generate without max_tokens.
DEFAULT_MAX_TOKENS = 16
# Chat fields, dropped once the prompt is token ids.
CHAT_FIELDS = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "top_logprobs", "reasoning_effort",
}  # fmt: skip


async def run_passes(
    router: RequestRouter,
    context: RequestContext,
    one_pass: Callable[[RequestRouter, RequestContext], Awaitable[None]],
) -> None:
    """Prefill and decode until the answer is whole, where instances may give requests back."""
    context.record = start_token_record(context)
    while True:
        try:
            await one_pass(router, context)
        except Recomputed as error:
            context = next_pass(context, error)
            router.metrics.recomputed.add()
        else:
            return


class RecordingForwarder(StreamForwarder):
    """Reads every event for its token ids; only for instances that may give requests back."""

    __slots__ = ("_record",)

    def __init__(
        self,
        context: RequestContext,
        instance: str,
        on_start: Callable[[], None],
        record: TokenRecord,
    ) -> None:
        super().__init__(context, instance, on_start)
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


def start_token_record(context: RequestContext) -> TokenRecord | None:
    """A record where a recomputation could be carried out at all, else None.

    With several choices, tools or chat logprobs, token ids alone cannot continue the answer.
    """
    parsed = context.parsed
    is_chat = context.endpoint is OpenAIEndpoint.CHAT
    if (parsed.n or 1) > 1 or (is_chat and {"tools", "logprobs"} & context.fields.keys()):
        return None
    return TokenRecord(context.endpoint, shows_ids=bool(parsed.return_token_ids))


def next_pass(context: RequestContext, error: Recomputed) -> RequestContext:
    """The next pass: the same request with everything so far as its prompt."""
    record = context.record
    if record is None or record.num_passes >= MAX_PASSES:
        raise error
    record.num_passes += 1
    if not record.generated and not context.is_committed:
        return replace(context, attempt=context.attempt + 1)
    if not record.prompt:
        raise error
    fields = {name: raw for name, raw in context.fields.items() if name not in CHAT_FIELDS}
    fields["prompt"] = Raw(encode(record.prompt + record.generated))
    fields["max_tokens"] = Raw(encode(_tokens_left(context, record)))
    body = encode(fields)
    parsed, fields = parse_request(body)
    context.request.body = body
    return replace(
        context,
        endpoint=OpenAIEndpoint.COMPLETION,
        parsed=parsed,
        fields=fields,
        prompt_tokens=len(record.prompt) + len(record.generated),
        attempt=context.attempt + 1,
        is_committed=False,
        prefix_blocks=(),
        cached_tokens=None,
    )


def _tokens_left(context: RequestContext, record: TokenRecord) -> int | None:
    """None stands for "as many as fit", which only a chat request may ask for."""
    if record.limit is None:
        record.limit = context.parsed.token_limit
        if record.limit is None and record.endpoint is OpenAIEndpoint.COMPLETION:
            record.limit = DEFAULT_MAX_TOKENS
    return None if record.limit is None else max(1, record.limit - len(record.generated))
