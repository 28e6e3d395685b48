"""From a request's prompt or messages to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineFacts
from mooncake_engine.server.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from mooncake_engine.server.tools import template_calls
from mooncake_engine.text.limits import check_prompt
from mooncake_engine.text.tokenizer import Tokenizer

_LONG_TEXT = 20_000
"""Characters; longer texts take milliseconds to encode: other requests should not wait for them."""
_MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer continues. ``text`` is None where the client sent token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, facts: EngineFacts
) -> list[Prompt]:
    """One prompt per string or list of token ids.

    Raises:
        InvalidRequest: an empty or mixed list, or token ids outside the vocabulary.
        PromptTooLong: no room for an answer.
    """
    add_special_tokens = request.add_special_tokens is not False
    prompts = []
    for prompt in _separate(request.prompt):
        if isinstance(prompt, str):
            ids = await encode(tokenizer, prompt, add_special_tokens=add_special_tokens)
            prompts.append(Prompt(ids, prompt))
        else:
            prompts.append(Prompt(tuple(prompt)))
    for checked in prompts:
        check_prompt(checked.token_ids, facts, param="prompt")
    return prompts


async def chat_prompt(
    request: ChatRequest,
    tokenizer: Tokenizer,
    facts: EngineFacts,
    tools: Sequence[dict[str, Any]] = (),
) -> Prompt:
    """The conversation as the chat template lays it out, with the tools that are offered.

    Raises:
        InvalidRequest: no messages, no template, or the template refuses them.
        PromptTooLong: no room for an answer.
    """
    text = render_chat(request, tokenizer, tools)
    ids = await encode(tokenizer, text, add_special_tokens=bool(request.add_special_tokens))
    check_prompt(ids, facts, param="messages")
    return Prompt(ids, text)


def render_chat(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """The conversation's text, as the chat template lays it out with the tools that are offered.

    Raises:
        InvalidRequest: no messages, no template, or the template refuses them.
    """
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if continues and adds_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return tokenizer.render_chat(
        [_template_message(message) for message in request.messages],
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        tools=tools,
        template_kwargs=request.chat_template_kwargs,
    )


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids of a text, without holding up the event loop."""
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _separate(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(element) for element in prompt}
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds not in ({str}, {list}):
        raise InvalidRequest(
            "prompt must be a string, strings, token ids, or lists of token ids; "
            f"got a list of {' and '.join(sorted(kind.__name__ for kind in kinds)) or 'nothing'}",
            param="prompt",
        )
    if len(prompt) > _MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt must hold at most {_MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt"
        )
    return cast("list[str] | list[list[int]]", prompt)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates expect it: plain text, and ``developer`` by its older name."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    laid_out: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        laid_out["name"] = message.name
    if message.reasoning_content is not None:
        laid_out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        laid_out["tool_calls"] = template_calls(message.tool_calls)
    if message.tool_call_id is not None:
        laid_out["tool_call_id"] = message.tool_call_id
    return laid_out
