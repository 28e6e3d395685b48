"""Continued prompts: the client gets P's token immediately, and D gets it as part of the prompt.

For a D that recomputes the prompt's last token and samples after it, as vLLM does. If its prompt
ends with P's token, such a D does not repeat that token, so the client can get its first token
before D has even received the request. Requests whose output depends on more than the tokens so far
can't be continued this way; D generates all of their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from mooncake_proxy.api.openai_bodies import (
    ABSENT,
    DEFAULT_MAX_TOKENS,
    CompletionResponse,
    Fields,
    OpenAIEndpoint,
    encode,
    has_media,
    is_null,
)
from mooncake_proxy.api.proxied_request import TRUE, RequestContext, with_delivery
from mooncake_proxy.errors import DECODE_ERRORS, MalformedResponse
from mooncake_proxy.flows.stream_forwarder import StreamForwarder
from mooncake_proxy.flows.token_record import ANSWER_ERRORS, REPLACEMENT_CHARACTER, is_role_only
from mooncake_proxy.http1.sse import split_events

UNSUPPORTED_FIELDS = (
    "stop", "bad_words", "response_format", "structured_outputs", "tools", "functions", "logprobs",
    "top_logprobs", "logits_processors", "vllm_xargs", "prompt_embeds", "suffix",
)  # fmt: skip
"""Fields that depend on the answer so far, or whose format depends on where the answer starts."""
PENALTY_FIELDS = ("presence_penalty", "frequency_penalty")
"""Penalties on generated tokens: D would count P's token as part of the prompt."""
STRUCTURE_FIELDS = ("response_format", "structured_outputs")
"""Grammars, which start anew with each request."""
HISTORY_FIELDS = ("bad_words", *STRUCTURE_FIELDS, *PENALTY_FIELDS)
"""Fields by which the next token depends on which tokens have been generated, not prompted."""
TRUNCATION_FIELDS = ("truncate_prompt_tokens", "truncation_side")
"""Truncation of the prompt. P has already applied it; applied again by D, it would cut off P's
token or the prompt's first one."""


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """The prompt for D.

    Args:
        token_ids: token ids of the prompt, then P's token.
    """

    token_ids: list[int]

    def body(self, context: RequestContext, params: Raw) -> bytes:
        """The body for D, with all token limits reduced by P's token."""
        fields = {n: raw for n, raw in context.fields.items() if n not in TRUNCATION_FIELDS}
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
    """Whether D may continue from P's token as if the client had sent it."""
    parsed, fields = context.parsed, context.fields
    if not parsed.stream or (parsed.n or 1) > 1:
        return False
    if context.record is not None and not context.record.may_migrate:
        return False
    if parsed.return_token_ids or parsed.includes_continuous_usage:
        return False
    if asks_for(fields, (*UNSUPPORTED_FIELDS, *PENALTY_FIELDS)):
        return False
    # vLLM's D ignores the token ids if a content part has a media field, even a null one.
    if _fills_context(fields) or has_media(parsed.messages):
        return False
    return "seed" not in fields or is_null(fields["seed"]) or _is_greedy(fields)


def asks_for(fields: Fields, names: Sequence[str]) -> bool:
    """Whether a request has one of these fields with a value that has an effect."""
    return any(name in fields and not _is_off(name, fields[name]) for name in names)


def continued_prompt(
    context: RequestContext, answer: CompletionResponse, token_id: int | None
) -> ContinuedPrompt | None:
    """The prompt for D, or None if P's answer can't be continued.

    Args:
        context: a request for which `can_continue` holds.
        answer: P's answer.
        token_id: the token that P sampled, according to its `kv_transfer_params`.
    """
    [choice] = answer.choices
    prompt = answer.prompt_token_ids or choice.prompt_token_ids
    if not prompt or not choice.token_ids or token_id != choice.token_ids[-1]:
        return None
    message: dict[str, Any] = choice.message or {}
    text = choice.text if context.endpoint is OpenAIEndpoint.COMPLETION else message.get("content")
    # After an incomplete character D's detokenizer would repeat text of the prompt. Fields other
    # than `content` are the output of a parser, which can't be continued as text.
    is_plain = not any(value for name, value in message.items() if name not in ("role", "content"))
    if not text or text.endswith(REPLACEMENT_CHARACTER) or not is_plain:
        return None
    return ContinuedPrompt([*prompt, *choice.token_ids])


class ContinuedForwarder(StreamForwarder):
    """Joins D's stream to P's token: drops D's role-only event, and corrects the token counts."""

    __slots__ = ()

    def _forward(self, block: bytes) -> None:
        if not self._context.is_committed or b'"prompt_tokens"' in block:
            try:
                block = b"".join(_joined(*event) for event in split_events(block))
            except ANSWER_ERRORS as exc:
                raise MalformedResponse(self._instance, f"no OpenAI chunk: {exc}") from exc
        if block:
            super()._forward(block)


def _joined(event: bytes, data: bytes) -> bytes:
    """An event of D, changed to fit into the joined answer; empty if it is dropped."""
    if not data or data == b"[DONE]":
        return event
    chunk = msgspec.json.decode(data)
    usage, choices = chunk.get("usage"), chunk.get("choices")
    if not usage and not (choices and is_role_only(choices[0])):
        return event
    if not usage:
        return b""
    usage["prompt_tokens"] -= 1
    usage["completion_tokens"] += 1
    return b"data: %b\n\n" % encode(chunk)


def _value(raw: Raw) -> Any:
    """The value of a field, or infinity if it can't be decoded.

    Examples are numbers out of a float's range and JSON that is nested too deeply. The proxy
    forwards them, and the instances refuse them.
    """
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS:
        return math.inf


def _is_off(name: str, raw: Raw) -> bool:
    value = _value(raw)
    if name == "logprobs":  # in a completion, 0 asks for logprobs of the sampled tokens
        return value is None or value is False
    return value in (None, 0, False, [], {}, {"type": "text"}, "none")


def _fills_context(fields: dict[str, Raw]) -> bool:
    """Whether the prompt may be truncated so that only P's token still fits the context: D would
    have nothing to generate."""
    length = _value(fields.get("truncate_prompt_tokens", ABSENT))
    return isinstance(length, int) and length < 0


def _is_greedy(fields: dict[str, Raw]) -> bool:
    return "temperature" in fields and _value(fields["temperature"]) == 0
