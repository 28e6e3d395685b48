"""P's first token goes to the client at once, and D gets it as the end of the prompt.

For a D that computes the prompt's last token anyway and samples after it, as vLLM does: asked for
the prompt and P's token, it repeats nothing, and the client has its first token before D is asked.
Not for requests whose answer depends on more than the tokens so far: those get every token from D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from mooncake_proxy.api.openai_bodies import (
    ABSENT,
    DEFAULT_MAX_TOKENS,
    CompletionResponse,
    OpenAIEndpoint,
    encode,
    has_media,
    is_null,
)
from mooncake_proxy.api.proxied_request import TRUE, RequestContext, with_delivery
from mooncake_proxy.errors import UNREADABLE, MalformedAnswer
from mooncake_proxy.flows.stream_forwarder import StreamForwarder
from mooncake_proxy.flows.token_record import HALF_A_CHARACTER, NO_ANSWER, only_begins
from mooncake_proxy.http1.sse import split_events

OBSTACLES = (
    "stop", "bad_words", "response_format", "structured_outputs", "tools", "functions", "logprobs",
    "top_logprobs", "logits_processors", "vllm_xargs", "prompt_embeds", "suffix",
)  # fmt: skip
"""Fields that look back on the answer so far, or whose form depends on where it begins."""
COUNTED = ("presence_penalty", "frequency_penalty")
"""They count what was generated, and P's token would count as prompt."""
CUTS_PROMPT = ("truncate_prompt_tokens", "truncation_side")
"""P has done that: the prompt's token ids are those that it computed. Done again, it would cut P's
token, or the prompt's first one."""


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """What D is asked for.

    Args:
        token_ids: of the prompt and P's token.
    """

    token_ids: list[int]

    def body(self, context: RequestContext, params: Raw) -> bytes:
        """The body for D: one token less of everything."""
        fields = {n: raw for n, raw in context.fields.items() if n not in CUTS_PROMPT}
        parsed = context.parsed
        params = with_delivery(params, delivered=True)
        ids = encode(self.token_ids)
        if context.endpoint is OpenAIEndpoint.CHAT:
            params = Raw(b'%b,"prompt_token_ids":%b}' % (bytes(params)[:-1], ids))
        else:
            fields["prompt"] = Raw(ids)
            fields["max_tokens"] = Raw(encode((parsed.max_tokens or DEFAULT_MAX_TOKENS) - 1))
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            limit = getattr(parsed, name)
            if limit is not None:
                fields[name] = Raw(encode(max(0, limit - 1)))
        fields["kv_transfer_params"] = params
        if context.record is not None:
            fields["return_token_ids"] = TRUE
        return encode(fields)


def can_continue(context: RequestContext) -> bool:
    """Whether a D may go on from P's token as if the client had sent it."""
    parsed, fields = context.parsed, context.fields
    if not parsed.stream or (parsed.n or 1) > 1:
        return False
    if context.record is not None and not context.record.may_migrate:
        return False
    if parsed.return_token_ids or parsed.includes_continuous_usage:
        return False
    if any(name in fields and not _is_off(name, fields[name]) for name in (*OBSTACLES, *COUNTED)):
        return False
    # vLLM's D drops the token ids where a part has a field of media, though it be null.
    if _fills_context(fields) or has_media(parsed.messages):
        return False
    return "seed" not in fields or is_null(fields["seed"]) or _is_greedy(fields)


def continued_prompt(
    context: RequestContext, answer: CompletionResponse, token_id: int | None
) -> ContinuedPrompt | None:
    """What to ask D for, or None where P's answer can't be continued.

    Args:
        context: for which ``can_continue`` holds.
        answer: of P.
        token_id: the token that P sampled, as its parameters name it.
    """
    [choice] = answer.choices
    prompt = answer.prompt_token_ids or choice.prompt_token_ids
    if not prompt or not choice.token_ids or token_id != choice.token_ids[-1]:
        return None
    message: dict[str, Any] = choice.message or {}
    text = choice.text if context.endpoint is OpenAIEndpoint.COMPLETION else message.get("content")
    # Half a character would make D's detokenizer repeat the prompt; a parser's words are not text.
    is_plain = not any(value for name, value in message.items() if name not in ("role", "content"))
    if not text or text.endswith(HALF_A_CHARACTER) or not is_plain:
        return None
    return ContinuedPrompt([*prompt, *choice.token_ids])


class ContinuedForwarder(StreamForwarder):
    """Joins D's stream to P's token: one beginning, one count of tokens."""

    __slots__ = ()

    def _forward(self, block: bytes) -> None:
        if not self._context.is_committed or b'"prompt_tokens"' in block:
            try:
                block = b"".join(_joined(*event) for event in split_events(block))
            except NO_ANSWER as exc:
                raise MalformedAnswer(self._instance, f"no OpenAI chunk: {exc}") from exc
        if block:
            super()._forward(block)


def _joined(event: bytes, data: bytes) -> bytes:
    """An event of D as a part of the whole answer."""
    if not data or data == b"[DONE]":
        return event
    chunk = msgspec.json.decode(data)
    usage, choices = chunk.get("usage"), chunk.get("choices")
    if not usage and not (choices and only_begins(choices[0])):
        return event
    if not usage:
        return b""
    usage["prompt_tokens"] -= 1
    usage["completion_tokens"] += 1
    return b"data: %b\n\n" % encode(chunk)


def _value(raw: Raw) -> Any:
    """What a field says; where that can't be read, as a number that no float holds or what is
    nested too deeply, it is the instances that refuse it."""
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return math.inf


def _is_off(name: str, raw: Raw) -> bool:
    value = _value(raw)
    if name == "logprobs":  # 0 of a completion asks for those of the tokens themselves
        return value is None or value is False
    return value in (None, 0, False, [], {}, "none")


def _fills_context(fields: dict[str, Raw]) -> bool:
    """Whether the prompt may be cut so that it leaves room for P's token alone: D would be asked
    for none."""
    length = _value(fields.get("truncate_prompt_tokens", ABSENT))
    return isinstance(length, int) and length < 0


def _is_greedy(fields: dict[str, Raw]) -> bool:
    return "temperature" in fields and _value(fields["temperature"]) == 0
