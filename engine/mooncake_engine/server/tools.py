"""Tools between the API and the model: what is offered, what has to be called, what was called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.server.call_grammars import call_grammar
from mooncake_engine.server.protocol import ChatRequest, NamedToolChoice, Tool, ToolCall
from mooncake_engine.text.answers import Answer
from mooncake_engine.text.generation import TextUpdate
from mooncake_engine.text.tool_calls import Schemas
from mooncake_engine.text.tool_forms import PARSERS


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of one request.

    Args:
        tool_format: how the model calls them; None where no calls are looked for.
        shown: what the chat template gets.
        grammar: what the answer must look like where a call is wanted.
    """

    tool_format: str | None = None
    shown: Sequence[dict[str, Any]] = field(default_factory=tuple)
    grammar: Grammar | None = None

    @property
    def schemas(self) -> Schemas:
        """Of their parameters."""
        functions = [tool["function"] for tool in self.shown]
        return {function["name"]: function.get("parameters", {}) for function in functions}


def offered_tools(
    request: ChatRequest, tool_format: str | None, structure: Grammar | None
) -> OfferedTools:
    """What a request offers and wants, for a model that calls tools in that form.

    Args:
        structure: what an answer must look like that calls nothing.

    Raises:
        InvalidRequest: a choice without tools or of an unknown one, two tools of one name, a model
            without tools, or a structure beside a call that has to be made.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return OfferedTools(grammar=structure)
    if choice == "none":
        return OfferedTools(grammar=structure)
    _check_names(request.tools)
    if tool_format is None:
        raise InvalidRequest(
            "this model's chat template shows no way to call tools that is known here; if it has "
            f"one, start the server with --tool-call-parser, one of {', '.join(PARSERS)}",
            param="tools",
        )
    shown = shown_tools(request.tools)
    return OfferedTools(tool_format, shown, _grammar(request, tool_format, structure))


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates expect them."""
    return [_shown(tool) for tool in tools]


def call_prefix(request_id: str, index: int) -> str:
    """What the ids of the calls of answer ``index`` begin with."""
    return f"call_{request_id}_{index}"


def call_deltas(prefix: str, update: TextUpdate) -> list[dict[str, Any]]:
    """Pieces of calls as a stream shows them."""
    return [
        {"index": delta.index, "function": {"arguments": delta.arguments}}
        if delta.name is None
        else {
            "index": delta.index,
            **_call(f"{prefix}_{delta.index}", delta.name, delta.arguments),
        }
        for delta in update.calls
    ]


def whole_calls(prefix: str, answer: Answer) -> list[dict[str, Any]]:
    """An answer's calls."""
    names = [delta.name for delta in answer.calls if delta.name is not None]
    arguments = [""] * len(names)
    for delta in answer.calls:
        arguments[delta.index] += delta.arguments
    pairs = zip(names, arguments, strict=True)
    return [_call(f"{prefix}_{index}", *pair) for index, pair in enumerate(pairs)]


def template_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """An earlier answer's calls as chat templates expect them: arguments as data.

    Raises:
        InvalidRequest: arguments that are no JSON.
    """
    return [
        {
            "type": "function",
            **({"id": call.id} if call.id is not None else {}),
            "function": {"name": call.function.name, "arguments": _data(call.function.arguments)},
        }
        for call in calls
    ]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _shown(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}


def _data(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError as exc:
        raise InvalidRequest(
            f"a tool call's arguments must be JSON: {exc}", param="messages"
        ) from exc


def _check_names(tools: Sequence[Tool]) -> None:
    names = [tool.function.name for tool in tools]
    for name in names:
        if not name or names.count(name) > 1:
            raise InvalidRequest(
                f"tools must have names of their own, got {name!r} {names.count(name)} times",
                param="tools",
            )


def _grammar(request: ChatRequest, tool_format: str, structure: Grammar | None) -> Grammar | None:
    """What the answer must look like: free where nothing is forced and nothing structured."""
    tools, choice = request.tools or [], request.tool_choice
    if choice in (None, "auto"):
        if structure is None:
            return None
        return call_grammar(
            tools, tool_format, is_one=_is_one(request), instead=_json_rule(structure)
        )
    if structure is not None:
        raise InvalidRequest(
            "an answer that has to call a tool has no other structure: leave response_format and "
            "structured_outputs out",
            param="tool_choice",
        )
    if not isinstance(choice, NamedToolChoice):
        return call_grammar(tools, tool_format, is_one=_is_one(request))
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r}, which is not among the tools",
            param="tool_choice",
        )
    return call_grammar(named, tool_format, is_one=True)


def _is_one(request: ChatRequest) -> bool:
    return request.parallel_tool_calls is False


def _json_rule(structure: Grammar) -> str:
    if structure.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            "beside tools, structured_outputs may only be a JSON schema", param="structured_outputs"
        )
    return f"%json {structure.source}"
