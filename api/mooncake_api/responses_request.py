"""Translates requests to ``/v1/responses`` (OpenAI's API) to chat requests. The API is stateless
here: each request contains its whole conversation."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from mooncake_api.errors import RequestRejected
from mooncake_api.translation import UNTRANSLATED_FIELDS, Json, content_of, encode, read_request

_STATELESS = "responses are not stored: send the conversation in input"
_INSTEAD = {
    **UNTRANSLATED_FIELDS,
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "send its text in instructions and input",
    "context_management": "shorten the input yourself",
    "moderation": "leave it out",
    "access_programs": "leave it out",
    "image": "only text is supported",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "include_reasoning": "reasoning is always an item of its own",
    "logprobs": "use top_logprobs and include",
    "stop": "use /v1/chat/completions",
    "stop_sequences": "use /v1/chat/completions",
    "system": "use instructions",
}
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_WEB_SEARCH = "web_search"
"""What the types of web search tools begin with."""


class Reasoning(Struct):
    """Reasoning options. ``summary`` has no effect: reasoning is shown unabridged."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Struct):
    """The format of the output: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct):
    """The format and verbosity of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    """The body of ``POST /v1/responses``. Input items and tools are parsed one by one, by their
    ``type``."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None


def read_responses_request(body: bytes) -> tuple[ResponsesRequest, bytes]:
    """Parse a request; returns it with the body of the equivalent chat request.

    Raises:
        RequestRejected: the request can't be expressed as a chat request; the message names the
            field.
    """
    request, others = read_request(body, ResponsesRequest, _INSTEAD)
    _check_stateless(request)
    chat: Json = {"messages": [*_messages(request)], **others, **_sampling(request)}
    chat |= _tools(request)
    if request.truncation == "auto":  # as in vLLM
        chat.setdefault("truncate_prompt_tokens", -1)
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return request, encode(chat)


def _check_stateless(request: ResponsesRequest) -> None:
    if request.store:
        raise RequestRejected(
            "store: responses are not stored; send false or leave it out", param="store"
        )
    if request.background:
        raise RequestRejected(
            "background: background responses are not supported; send false or leave it out",
            param="background",
        )
    for name in request.include or ():
        is_of_call = "_call" in name.partition(".")[0]  # of a tool that never runs here
        if name not in _INCLUDED and not is_of_call:
            raise RequestRejected(f"include {name!r} is not supported", param="include")


def _sampling(request: ResponsesRequest) -> Json:
    text, reasoning = request.text or TextConfig(), request.reasoning or Reasoning()
    chat: Json = {
        "model": request.model,
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "response_format": _response_format(text.format or TextFormat()),
        "verbosity": text.verbosity,
        "reasoning_effort": reasoning.effort,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": request.service_tier,
    }
    if wants_logprobs(request):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return {name: value for name, value in chat.items() if value is not None}


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether the answer shows log probabilities."""
    return bool(request.top_logprobs) or _INCLUDED[0] in (request.include or ())


def _response_format(wanted: TextFormat) -> Json | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    described = {"name": wanted.name, "description": wanted.description, "schema": wanted.schema}
    schema: Json = {name: value for name, value in described.items() if value is not None}
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"type": "json_schema", "json_schema": schema}


def _tools(request: ResponsesRequest) -> Json:
    chat: Json = {}
    tools = []
    for i, tool in enumerate(request.tools or ()):
        tools += _offered(tool, f"tools[{i}]")
    choice = request.tool_choice
    if isinstance(choice, dict):
        tools, choice = _chosen(tools, choice)
    if tools:
        chat["tools"] = tools
    # Agents send "auto" without tools, too. It has no effect, but the chat endpoint rejects it.
    if choice is not None and (tools or choice not in ("auto", "none")):
        chat["tool_choice"] = choice
    if request.parallel_tool_calls is not None:
        chat["parallel_tool_calls"] = request.parallel_tool_calls
    return chat


def _offered(tool: Json, path: str) -> list[Json]:
    """The functions of a tool. Web search, which agents offer by default, is dropped: the model
    answers without it, which the API allows."""
    kind, inner = tool.get("type"), tool.get("tools")
    if isinstance(kind, str) and kind.startswith(_WEB_SEARCH):
        return []
    if kind != "namespace":
        return [_tool(tool, path)]
    if not isinstance(inner, list) or not isinstance(tool.get("name"), str):
        raise RequestRejected(f"{path}: wanted a name and a list of tools", param=path)
    found = []
    for i, each in enumerate(inner):
        where = f"{path}.tools[{i}]"
        shown = _tool(each if isinstance(each, dict) else {}, where)
        shown["function"]["name"] = flat_name(tool["name"], _word(each, "name", where))
        found.append(shown)
    return found


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a namespace's function in the chat request."""
    return name if namespace is None else f"{namespace}__{name}"


def namespaces(request: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Namespace and name of every function in a namespace, by its name in the chat request."""
    return {
        flat_name(tool["name"], each["name"]): (tool["name"], each["name"])
        for tool in request.tools or ()
        if tool.get("type") == "namespace"
        for each in tool["tools"]
    }


def _tool(tool: Json, path: str) -> Json:
    if tool.get("type") != "function":
        raise RequestRejected(
            f"{path}: tools of type {tool.get('type')!r} are not supported, only 'function'; "
            "leave it out",
            param=path,
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chosen(tools: list[Json], choice: Json) -> tuple[list[Json], str | Json]:
    """The tools that the model may call, and the chat request's ``tool_choice``."""
    kind = choice.get("type")
    if kind == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(kind, str) and kind.startswith(_WEB_SEARCH):
        return tools, "auto"
    if kind != "allowed_tools":
        raise RequestRejected(f"tool_choice of type {kind!r} is not supported", param="tool_choice")
    listed = choice.get("tools")
    entries = listed if isinstance(listed, list) else []
    allowed = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    kept = [tool for tool in tools if tool["function"].get("name") in allowed]
    return kept, str(choice.get("mode", "auto"))


def _messages(request: ResponsesRequest) -> list[Json]:
    """The chat messages for instructions and input. The items of one model turn become one message.
    System messages at the start are merged, because many chat templates accept only one."""
    items = request.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    turns = _Turns()
    if request.instructions:
        turns.add_instructions(request.instructions)
    for index, item in enumerate(items):
        turns.add(item, f"input[{index}]")
    return turns.messages


class _Turns:
    """Builds the messages of a conversation from its items."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, item: Json, path: str) -> None:
        """Add an item."""
        kind = item.get("type", "message")
        if kind == "message":
            self._add_turn(item, path)
        elif kind == "function_call":
            self._add_call(item, path)
        elif kind == "function_call_output":
            text = "\n".join(_texts(item.get("output"), f"{path}.output"))
            call_id = _word(item, "call_id", path)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "reasoning":
            self._add_reasoning(item, path)
        elif kind == "item_reference":
            raise RequestRejected(f"{path}: item_reference: {_STATELESS}", param=path)
        else:
            raise RequestRejected(
                f"{path}: items of type {kind!r} are not supported; leave it out", param=path
            )

    def add_instructions(self, text: str) -> None:
        """Add a system message."""
        if [each["role"] for each in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def _add_turn(self, item: Json, path: str) -> None:
        role, texts = item.get("role"), _texts(item.get("content"), f"{path}.content")
        if role not in ("user", "system", "developer", "assistant"):
            raise RequestRejected(
                f"{path}.role: wanted user, assistant, system or developer, found {role!r}",
                param=f"{path}.role",
            )
        if role == "assistant":
            self._model_turn("content", "tool_calls")["content"] = content_of(texts)
        elif role == "user":
            self.messages.append({"role": "user", "content": content_of(texts)})
        else:
            self.add_instructions("\n".join(texts))

    def _add_call(self, item: Json, path: str) -> None:
        function = {name: _word(item, name, path) for name in ("name", "arguments")}
        if item.get("namespace") is not None:
            function["name"] = flat_name(_word(item, "namespace", path), function["name"])
        call = {"id": _word(item, "call_id", path), "type": "function", "function": function}
        self._model_turn().setdefault("tool_calls", []).append(call)

    def _add_reasoning(self, item: Json, path: str) -> None:
        """Add an item's reasoning text. Encrypted reasoning comes from another server and is
        skipped."""
        text = "\n".join(_texts(item.get("content") or item.get("summary") or "", path))
        if text:
            self._model_turn("content", "tool_calls", "reasoning")["reasoning"] = text

    def _model_turn(self, *unlike: str) -> Json:
        """The model's message that an item belongs to: the last message, or a new one if that is
        not the model's or has any of the fields in ``unlike``."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in unlike):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _texts(content: Any, path: str) -> list[str]:
    """The texts of a string or of a list of text parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestRejected(f"{path}: wanted a string or a list of parts", param=path)
    return [_part(part, f"{path}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    name = "refusal" if kind == "refusal" else "text"
    kinds = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
    if kind not in kinds or not isinstance(part.get(name), str):
        raise RequestRejected(
            f"{path}: parts of type {kind!r} are not supported, only text", param=path
        )
    return str(part[name])


def _word(item: Json, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestRejected(f"{path}.{name}: wanted a string", param=f"{path}.{name}")
    return value
