"""Builds the bodies and chunks of completions and chat completions, with their log probabilities.

A ``ResponseBuilder`` per endpoint lays out plain data; ``generation_handler`` encodes and sends it.
Log probabilities are a ``LongList``: with 20 per token, a long prompt takes seconds to encode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import msgspec

from mooncake_engine.messages import FinishReason, TokenLogprobs
from mooncake_engine.server.request_context import GeneratedChoice, Prompt, RequestContext
from mooncake_engine.server.tool_choice import call_deltas, call_ids, complete_calls
from mooncake_engine.text.completion_output import ChoiceOutput, TextUpdate

_MARK = "\x00"
_ENCODED_MARK = msgspec.json.encode(_MARK)
encode_text = msgspec.json.Encoder().encode
"""Encodes a text as a JSON string."""
DONE = b"data: [DONE]\n\n"
"""The event that ends a stream which completed without an error."""
TokenBytes = Callable[[int], bytes]
"""Returns the bytes that a token id stands for."""
TokenName = Callable[[int], str]
"""Returns the name of a token id in log probabilities."""


_PIECE = 32
"""Items of a ``LongList`` that are encoded at once: 2 ms with 20 log probabilities each."""


_CUT = b"\x00"
"""A byte that no JSON has."""


class LongList:
    """A list in a response whose items are made when it is encoded.

    Args:
        items: the items, which are iterated over once.
    """

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


async def encode_paced(body: dict[str, Any]) -> bytes:
    """Encode a response as JSON; between the pieces of long lists, the event loop does other work.
    A thread would hold it up for longer, since it hands over the GIL every 5 ms only."""
    lists: list[LongList] = []

    def cut(each: LongList) -> msgspec.Raw:
        lists.append(each)
        return msgspec.Raw(_CUT)

    first, *others = msgspec.json.encode(body, enc_hook=cut).split(_CUT)
    pieces = [first]
    for each, text in zip(lists, others, strict=True):
        items, comma = iter(each.items), b"["
        while part := list(islice(items, _PIECE)):
            pieces += (comma, msgspec.json.encode(part)[1:-1])
            comma = b","
            await asyncio.sleep(0)
        pieces += (b"]" if comma == b"," else b"[]", text)
    return b"".join(pieces)


class ResponseBuilder(Protocol):
    """Lays out one endpoint's responses as plain data; ``sse`` and ``ChunkTemplate`` encode it."""

    object_name: str
    chunk_object_name: str

    def api_id(self, context: RequestContext) -> str:
        """The response's ``id``."""

    def opening(self, context: RequestContext, index: int) -> dict[str, Any] | None:
        """The choice in its first chunk, before any text; None if the endpoint has no such
        chunk."""

    def plain_delta(self, index: int, text: str) -> dict[str, Any]:
        """A choice in a chunk that holds only text."""

    def delta(
        self,
        context: RequestContext,
        choice: GeneratedChoice,
        update: TextUpdate,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """A choice in a chunk, with all its fields; the first chunk holds the echo."""

    def choice(self, context: RequestContext, choice: GeneratedChoice) -> dict[str, Any]:
        """A choice of a complete response."""

    def top_level_fields(
        self, context: RequestContext, choices: Sequence[GeneratedChoice]
    ) -> dict[str, Any]:
        """Additional top-level fields of a complete response."""


class CompletionResponseBuilder:
    """Builds the responses of ``/v1/completions``."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def api_id(self, context: RequestContext) -> str:
        return f"cmpl-{context.request_id}"

    def opening(self, context: RequestContext, index: int) -> dict[str, Any] | None:
        return None

    def plain_delta(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def delta(
        self,
        context: RequestContext,
        choice: GeneratedChoice,
        update: TextUpdate,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        prompt, body = choice.prompt, self.plain_delta(choice.index, update.text)
        if context.echoes and is_first:
            body["text"] = f"{prompt.text}{update.text}"
        return self._filled(body, context, prompt, update, is_first=is_first)

    def choice(self, context: RequestContext, choice: GeneratedChoice) -> dict[str, Any]:
        prompt, output = choice.prompt, choice.output
        text = f"{prompt.text}{output.text}" if context.echoes else output.text
        body = self.plain_delta(choice.index, text)
        self._filled(body, context, prompt, output, is_first=True)
        if context.returns_token_ids:
            body["prompt_token_ids"] = prompt.token_ids
        if context.shows_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._token_bytes)
        return body

    def top_level_fields(
        self, context: RequestContext, choices: Sequence[GeneratedChoice]
    ) -> dict[str, Any]:
        return {}

    def _filled(
        self,
        body: dict[str, Any],
        context: RequestContext,
        prompt: Prompt,
        output: TextUpdate | ChoiceOutput,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        body["finish_reason"] = output.finish
        body["stop_reason"] = output.stop_reason
        if context.wants_logprobs:
            echoed = prompt if context.echoes else None
            name = _naming(context, self._token_bytes)
            body["logprobs"] = self._logprobs(output, echoed, name, is_first=is_first)
        if context.returns_token_ids:
            body["token_ids"] = output.token_ids
        return body

    def _logprobs(
        self,
        output: TextUpdate | ChoiceOutput,
        echoed: Prompt | None,
        name: TokenName,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        if echoed is None:
            return completion_logprobs(output.logprobs, output.text_offsets, name)
        offsets = [len(echoed.text or "") + offset for offset in output.text_offsets]
        if not is_first:
            return completion_logprobs(output.logprobs, offsets, name)
        entries = [*output.prompt_logprobs, *output.logprobs]
        lists = completion_logprobs(entries, [*echoed.offsets, *offsets], name)
        return after_first_token(lists, name(echoed.token_ids[0]))


class ChatResponseBuilder:
    """Builds the responses of ``/v1/chat/completions``."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def api_id(self, context: RequestContext) -> str:
        return f"chatcmpl-{context.request_id}"

    def opening(self, context: RequestContext, index: int) -> dict[str, Any] | None:
        if context.kv_transfer.is_first_delivered:
            return None
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def plain_delta(self, index: int, text: str) -> dict[str, Any]:
        delta = {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(
        self,
        context: RequestContext,
        choice: GeneratedChoice,
        update: TextUpdate,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        body = self.plain_delta(choice.index, update.text)
        if update.calls:
            calls = call_deltas(
                call_ids(context.request_id, choice.index, context.tool_format), update
            )
            content = {"content": update.text} if update.text else {}
            body["delta"] = content | {"tool_calls": calls}
        if update.reasoning and context.shows_reasoning:
            content = body["delta"] if update.text or update.calls else {}
            body["delta"] = _reasoning(update.reasoning) | content
        return self._filled(body, context, update)

    def choice(self, context: RequestContext, choice: GeneratedChoice) -> dict[str, Any]:
        index, output = choice.index, choice.output
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if output.calls:
            message["content"] = output.text or None
            message["tool_calls"] = complete_calls(
                call_ids(context.request_id, index, context.tool_format), output
            )
        if output.reasoning:
            message["content"] = output.text or None
            message |= _reasoning(output.reasoning) if context.shows_reasoning else {}
        body: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
        return self._filled(body, context, output)

    def top_level_fields(
        self, context: RequestContext, choices: Sequence[GeneratedChoice]
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if context.returns_token_ids:
            fields["prompt_token_ids"] = choices[0].prompt.token_ids
        if context.shows_prompt_logprobs:
            entries = choices[0].output.prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(entries, self._token_bytes)
        return fields

    def _filled(
        self, body: dict[str, Any], context: RequestContext, output: TextUpdate | ChoiceOutput
    ) -> dict[str, Any]:
        body["finish_reason"] = output.finish
        if output.ends_with_calls and output.finish is FinishReason.STOP:
            body["finish_reason"] = "tool_calls"
        if output.finish is not None:
            body["stop_reason"] = output.stop_reason
        if context.wants_logprobs:
            name = _naming(context, self._token_bytes, is_chat=True)
            body["logprobs"] = chat_logprobs(output.logprobs, self._token_bytes, name)
        if context.returns_token_ids:
            body["token_ids"] = output.token_ids
        return body


def _reasoning(text: str) -> dict[str, Any]:
    """The reasoning under vLLM's current field name, and under its former one, which other servers
    use."""
    return {"reasoning": text, "reasoning_content": text}


class ChunkTemplate:
    """The bytes before and after the text in a text-only chunk of one choice, encoded once.

    A streamed token then only costs the encoding of its own text.
    """

    def __init__(self, builder: ResponseBuilder, context: RequestContext, index: int) -> None:
        choice = builder.plain_delta(index, _MARK)
        whole = sse(chunk(builder, context, [choice]))
        self.head, _, self.tail = whole.rpartition(_ENCODED_MARK)

    def encode(self, text: str) -> bytes:
        """The event that adds ``text``."""
        return self.head + encode_text(text) + self.tail


def chunk(
    builder: ResponseBuilder, context: RequestContext, choices: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A chunk of a streamed response. If the client asked for usage, every chunk has ``usage``,
    which is null where ``more`` gives none."""
    if context.includes_usage:
        more.setdefault("usage", None)
    return {
        "id": builder.api_id(context),
        "object": builder.chunk_object_name,
        "created": context.created,
        "model": context.model,
        "choices": choices,
        **more,
    }


def sse(payload: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(payload, enc_hook=_whole_list) + b"\n\n"


def _whole_list(each: LongList) -> list[Any]:
    return list(each.items)


_MIN_LOGPROB = -9999.0
"""vLLM's log probability of a token that could not be chosen, as JSON has no infinity."""


def completion_logprobs(
    entries: Sequence[TokenLogprobs], text_offsets: Sequence[int], name: TokenName
) -> dict[str, Any]:
    """Log probabilities in the format of ``/v1/completions``: four parallel lists."""
    return {
        "tokens": LongList(name(entry.token_id) for entry in entries),
        "token_logprobs": LongList(_finite(entry.logprob) for entry in entries),
        "top_logprobs": LongList(
            # includes the chosen token, whatever its rank, because clients look it up here
            {
                name(token_id): _finite(value)
                for token_id, value in (*entry.top, (entry.token_id, entry.logprob))
            }
            for entry in entries
        ),
        "text_offset": list(text_offsets),
    }


def after_first_token(lists: dict[str, Any], token: str) -> dict[str, Any]:
    """Prepend a prompt's first token to the four lists. Nothing precedes that token, so it has no
    probability. The offsets already include it."""
    return {
        "tokens": LongList(chain((token,), lists["tokens"].items)),
        "token_logprobs": LongList(chain((None,), lists["token_logprobs"].items)),
        "top_logprobs": LongList(chain((None,), lists["top_logprobs"].items)),
        "text_offset": lists["text_offset"],
    }


def prompt_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> LongList:
    """vLLM's format of ``prompt_logprobs``: one object per token, by token id; null for the first.

    Args:
        entries: the log probabilities of the prompt's tokens from the second one on.
    """
    return LongList(chain((None,), (_by_id(entry, token_bytes) for entry in entries)))


def _by_id(entry: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Any]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)]
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, value, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    }


def chat_logprobs(
    entries: Sequence[TokenLogprobs], token_bytes: TokenBytes, name: TokenName
) -> dict[str, Any]:
    """Log probabilities in the format of ``/v1/chat/completions``: one object per token."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes(token_id)),
        }

    return {
        "content": LongList(
            described(entry.token_id, entry.logprob)
            | {"top_logprobs": [described(token_id, value) for token_id, value in entry.top]}
            for entry in entries
        )
    }


def _naming(
    context: RequestContext, token_bytes: TokenBytes, *, is_chat: bool = False
) -> TokenName:
    """How the request's log probabilities name tokens: chat has their bytes beside the name."""
    if context.names_tokens_by_id:
        return "token_id:{}".format
    if is_chat:
        return lambda token_id: token_bytes(token_id).decode(errors="replace")
    return lambda token_id: _name(token_bytes(token_id))


def _name(token: bytes) -> str:
    """A token's text, or OpenAI's notation for a token that is part of a character, so that
    different tokens have different names."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
