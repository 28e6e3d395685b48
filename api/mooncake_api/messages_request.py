"""Translates requests to ``/v1/messages`` (Anthropic's API) to chat requests."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from mooncake_api.errors import RequestRejected
from mooncake_api.translation import (
    UNTRANSLATED_FIELDS,
    Json,
    content_of,
    encode,
    read_request,
    without_billing_line,
)

_INSTEAD = {
    **UNTRANSLATED_FIELDS,
    "container": "only text is supported",
    "mcp_servers": "call their tools yourself",
    "diagnostics": "leave it out",
    "input": "use messages",
    "instructions": "use system",
    "stop": "use stop_sequences",
    "response_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort",
    "include_reasoning": "use thinking.display",
    "logprobs": "use /v1/chat/completions",
    "top_logprobs": "use /v1/chat/completions",
    "stream_options": "streams always report usage",
    "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
}


class OutputFormat(Struct):
    """JSON output that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """The reasoning effort and the format of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(Struct):
    """An edit that the server may apply to the messages; this server applies none."""

    type: str
    keep: Any = None


class ContextManagement(Struct):
    """Context edits; accepted only if they keep everything."""

    edits: list[ContextEdit] = []  # msgspec copies list defaults


class Thinking(Struct):
    """Whether the model thinks. ``budget_tokens`` has no effect: ``max_tokens`` limits the whole
    answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(Struct):
    """Which tools the model must or may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Struct):
    """The user on whose behalf the request is sent."""

    user_id: str | None = None


class MessagesRequest(Struct, kw_only=True):
    """The body of ``POST /v1/messages``. Content blocks and tools are parsed one by one, by their
    ``type``."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(Struct, kw_only=True):
    """The body of ``POST /v1/messages/count_tokens``: the fields that affect the count."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: Thinking | None = None


def read_messages_request(body: bytes) -> tuple[MessagesRequest, bytes]:
    """Parse a request; returns it with the body of the equivalent chat request.

    Raises:
        RequestRejected: the request can't be expressed as a chat request; the message names the
            field.
    """
    request, others = read_request(body, MessagesRequest, _INSTEAD)
    for edit in request.context_management.edits if request.context_management else ():
        if not edit.type.startswith("clear_thinking") or edit.keep != "all":
            raise RequestRejected(
                f"context_management: {edit.type!r} is not supported: this server does not edit "
                "messages; shorten them yourself",
                param="context_management",
            )
    chat: Json = {**others, **_sampling(request), **_tools(request)}
    chat["messages"] = _conversation(request.system, request.messages)
    if continued := _continued(chat["messages"]):
        _check_continued(request)
        chat = continued | chat
    variables = (_template_variables(request.thinking) or {}) | (request.chat_template_kwargs or {})
    if variables:
        chat["chat_template_kwargs"] = variables
    if request.thinking is not None and request.thinking.display == "omitted":
        chat["include_reasoning"] = False
    if request.stream:
        # Anthropic's first event has the prompt's token count, so that every chunk needs usage.
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": options}
    return request, encode(chat)


def count_tokens_request(body: bytes) -> bytes:
    """The body of a ``/tokenize`` request for a body of ``/v1/messages/count_tokens``.

    Raises:
        RequestRejected: see ``read_messages_request``.
    """
    request, _ = read_request(body, CountTokensRequest, {})
    messages = _conversation(request.system, request.messages)
    wanted: Json = {"messages": messages, **_continued(messages)}
    if request.model is not None:
        wanted["model"] = request.model
    if request.tools:
        wanted["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if (variables := _template_variables(request.thinking)) is not None:
        wanted["chat_template_kwargs"] = variables
    return encode(wanted)


def _sampling(request: MessagesRequest) -> Json:
    config = request.output_config or OutputConfig()
    shape = config.format or request.output_format
    chat: Json = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "reasoning_effort": config.effort,
        "user": request.metadata and request.metadata.user_id,
    }
    if shape is not None:
        schema = {"name": "answer", "schema": shape.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in chat.items() if value is not None}


def _template_variables(thinking: Thinking | None) -> Json | None:
    """The variable that chat templates of hybrid reasoning models read."""
    return None if thinking is None else {"enable_thinking": thinking.type != "disabled"}


def _tools(request: MessagesRequest) -> Json:
    chat: Json = {}
    if request.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if choice is None:
        return chat
    if choice.type == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chat["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use is not None:
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat


def _tool(tool: Json, path: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise RequestRejected(
            f"{path}: tools of type {tool.get('type')!r} run on Anthropic's servers and are not "
            "supported; leave it out",
            param=path,
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _conversation(system: str | list[Json] | None, messages: list[Json]) -> list[Json]:
    found = _instructions(system or "", "system")
    for index, message in enumerate(messages):
        found += _turn(message, f"messages[{index}]")
    return found


def _instructions(content: str | list[Any], path: str) -> list[Json]:
    """A system message with the texts of all blocks, without a billing line; none if no text is
    left."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [without_billing_line(_text(block, f"{path}[{i}]")) for i, block in enumerate(blocks)]
    joined = "\n\n".join(filter(None, texts))
    return [{"role": "system", "content": joined}] if joined else []


def _continued(messages: list[Json]) -> Json:
    """The fields of the chat request that make the model continue its own last message; none if the
    conversation does not end with a text of the model."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last["content"] is None or last.get("tool_calls"):
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


def _check_continued(request: MessagesRequest) -> None:
    config = request.output_config or OutputConfig()
    if config.format or request.output_format:
        raise RequestRejected(
            "messages end with a text of the model, which the answer would continue, but a schema "
            "describes a whole answer: leave that message or output_config.format out",
            param="output_config.format" if config.format else "output_format",
        )


def _turn(message: Json, path: str) -> list[Json]:
    """The chat messages of one turn. Tool results become separate messages."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestRejected(
            f"{path}.role: wanted user, assistant or system, found {role!r}", param=f"{path}.role"
        )
    if not isinstance(content, str | list):
        raise RequestRejected(
            f"{path}.content: wanted a text or a list of blocks", param=f"{path}.content"
        )
    if role == "system":
        return _instructions(content, f"{path}.content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [(block, f"{path}.content[{i}]") for i, block in enumerate(content)]
    return [_model_turn(blocks)] if role == "assistant" else _user_turn(blocks)


def _model_turn(blocks: list[tuple[Any, str]]) -> Json:
    turn: Json = {"role": "assistant", "content": None}
    texts = []
    for block, path in blocks:
        kind = _kind(block)
        if kind == "text":
            texts.append(_text(block, path))
        elif kind == "thinking":
            turn["reasoning"] = turn.get("reasoning", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": _json_text(block.get("input"))}
            call = {"id": block.get("id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # encrypted by another server: skipped
            raise _refused_block(kind, path)
    if texts:
        turn["content"] = content_of(texts)
    return turn


def _user_turn(blocks: list[tuple[Any, str]]) -> list[Json]:
    turns: list[Json] = []
    for block, path in blocks:
        kind = _kind(block)
        if kind == "tool_result":
            result = {"tool_call_id": block.get("tool_use_id"), "content": _result(block, path)}
            turns.append({"role": "tool", **result})
        elif kind != "text":
            raise _refused_block(kind, path)
        elif turns and turns[-1]["role"] == "user":
            turns[-1]["content"].append(_text(block, path))
        else:
            turns.append({"role": "user", "content": [_text(block, path)]})
    for turn in turns:
        if turn["role"] == "user":
            turn["content"] = content_of(turn["content"])
    return turns


def _result(block: Json, path: str) -> str:
    """The text of a tool result. ``is_error`` is dropped: the text says whether the tool failed."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRejected(f"{path}.content: wanted a text or blocks", param=f"{path}.content")
    return "\n".join(_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _text(block: Any, path: str) -> str:
    if _kind(block) != "text" or not isinstance(block.get("text"), str):
        raise _refused_block(_kind(block), path)
    return str(block["text"])


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _refused_block(kind: Any, path: str) -> RequestRejected:
    return RequestRejected(
        f"{path}: blocks of type {kind!r} are not supported, only text", param=path
    )


def _json_text(value: Any) -> str:
    return encode({} if value is None else value).decode()
