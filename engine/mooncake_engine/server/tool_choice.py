"""Tool calling: the tools that a request offers, the grammar that forces a call, and the layout of
calls in a response."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.server.openai_protocol import ChatRequest, NamedToolChoice, Tool, ToolCall
from mooncake_engine.server.sampling_fields import MAX_GRAMMAR_CHARACTERS
from mooncake_engine.text.argument_types import types_of
from mooncake_engine.text.completion_output import ChoiceOutput, TextUpdate
from mooncake_engine.text.grammar_compiler import JSON_STYLE
from mooncake_engine.text.grammars import lark_literal
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tool_call_forms import PARSERS, DeepseekParser
from mooncake_engine.text.tool_call_parsers import Schemas

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that one request offers.

    Args:
        tool_format: the format in which the model calls them; None where the output is not parsed
            for calls.
        shown: the tools as the chat template receives them.
        grammar: the grammar that constrains the output; None where the output is free.
    """

    tool_format: str | None = None
    shown: Sequence[dict[str, Any]] = field(default_factory=tuple)
    grammar: Grammar | None = None

    @property
    def schemas(self) -> Schemas:
        """The JSON schema of each tool's parameters, by tool name."""
        functions = [tool["function"] for tool in self.shown]
        return {function["name"]: function.get("parameters", {}) for function in functions}


def offered_tools(
    request: ChatRequest,
    tool_format: str | None,
    structure: Grammar | None,
    tokenizer: Tokenizer,
) -> OfferedTools:
    """The tools that a request offers, and the grammar that its ``tool_choice`` implies.

    Args:
        tool_format: the format in which the model calls tools; None if it can't.
        structure: the grammar for an output without calls.
        tokenizer: the model's tokenizer.

    Raises:
        InvalidRequest: ``tool_choice`` without tools or with an unknown one, two tools of the same
            name, a model that can't call tools, or structured output beside a forced call.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return OfferedTools(grammar=structure)
    if choice == "none":
        return OfferedTools(grammar=structure)
    for name, count in Counter(tool.function.name for tool in request.tools).items():
        if not name or count > 1:
            raise InvalidRequest(
                f"tools must have unique names, got {name!r} {count} times", param="tools"
            )
    if tool_format is None:
        raise InvalidRequest(
            "this model's chat template has no known format of tool calls; if the model can call "
            f"tools, start the server with --tool-call-parser, one of {', '.join(PARSERS)}",
            param="tools",
        )
    shown = shown_tools(request.tools)
    grammar = _grammar(request, tool_format, structure, tokenizer)
    return OfferedTools(tool_format, shown, grammar)


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in the form that chat templates expect."""
    shown = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        if tool.function.parameters is not None:
            function["parameters"] = tool.function.parameters
        shown.append({"type": "function", "function": function})
    return shown


CallIds = Callable[[int], str]
"""Returns the id of a choice's call, given the call's number."""
_SHORT_ID_FORMAT = "mistral"
"""The format whose chat templates accept only ids of nine letters and digits."""


def call_ids(request_id: str, index: int, tool_format: str | None) -> CallIds:
    """The ids of a choice's calls. They are deterministic, so that every instance that continues
    the choice uses the same ones."""

    def long_id(number: int) -> str:
        return f"call_{request_id}_{index}_{number}"

    def short_id(number: int) -> str:
        return hashlib.sha256(long_id(number).encode()).hexdigest()[:9]

    return short_id if tool_format == _SHORT_ID_FORMAT else long_id


def call_deltas(call_id: CallIds, update: TextUpdate) -> list[dict[str, Any]]:
    """The call deltas of a streamed chunk."""
    return [
        {"index": delta.index, "function": {"arguments": delta.arguments}}
        if delta.name is None
        else {
            "index": delta.index,
            **_call(call_id(delta.index), delta.name, delta.arguments),
        }
        for delta in update.calls
    ]


def complete_calls(call_id: CallIds, output: ChoiceOutput) -> list[dict[str, Any]]:
    """The calls of a complete choice."""
    names = [delta.name for delta in output.calls if delta.name is not None]
    arguments: list[list[str]] = [[] for _ in names]
    for delta in output.calls:
        arguments[delta.index].append(delta.arguments)
    pairs = zip(names, map("".join, arguments), strict=True)
    return [_call(call_id(number), *pair) for number, pair in enumerate(pairs)]


def template_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The calls of an earlier response in the form that chat templates expect, with decoded
    arguments. Those that are not a JSON object become an empty one, as in vLLM: models write such
    arguments, and a refusal would also refuse every later turn of that conversation."""
    shown = []
    for call in calls:
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            _warn_of_arguments()
            arguments = {}
        named = {} if call.id is None else {"id": call.id}
        function = {"name": call.function.name, "arguments": arguments}
        shown.append({"type": "function", **named, "function": function})
    return shown


@cache
def _warn_of_arguments() -> None:
    """Log such arguments, once: each turn of each such conversation has them again."""
    logger.warning(
        "a conversation has a tool call whose arguments are not a JSON object; the chat template "
        "gets an empty one instead"
    )


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _grammar(
    request: ChatRequest, tool_format: str, structure: Grammar | None, tokenizer: Tokenizer
) -> Grammar | None:
    """The grammar that the output must follow; None where it is free."""
    tools, choice = request.tools or [], request.tool_choice
    is_single = request.parallel_tool_calls is False
    if choice in (None, "auto"):
        if structure is None:
            return None
        if structure.kind is not GrammarKind.JSON_SCHEMA:
            raise InvalidRequest(
                "with tools, structured_outputs may only be a JSON schema",
                param="structured_outputs",
            )
        instead = f"%json {structure.source}"
        return call_grammar(tools, tool_format, tokenizer, is_single=is_single, instead=instead)
    if structure is not None:
        raise InvalidRequest(
            "an answer that must call a tool can't have another structure: leave response_format "
            "and structured_outputs out",
            param="tool_choice",
        )
    if not isinstance(choice, NamedToolChoice):
        return call_grammar(tools, tool_format, tokenizer, is_single=is_single)
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r}, which is not among the tools",
            param="tool_choice",
        )
    return call_grammar(named, tool_format, tokenizer, is_single=True)


_ARGUMENTS_FIELD = {"hermes": "arguments", "llama3_json": "parameters", "mistral": "arguments"}
_SEPARATORS = {
    "hermes": "\n",
    "qwen3_coder": "\n",
    "llama3_json": "; ",
    "deepseek_v3": "\n",
    "deepseek_v31": "",
    "mistral": ", ",
}
"""By format: what is between two calls."""
_Around = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
_AROUND_CALL: _Around = dict.fromkeys(
    ("hermes", "qwen3_coder"), (("<tool_call>", "\n"), ("\n", "</tool_call>"))
)
_AROUND_CALLS: _Around = {
    "mistral": (("[TOOL_CALLS]", "["), ("]",)),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v31"), ((DeepseekParser.opening,), (DeepseekParser.closing,))
    ),
}
"""By format: what is before and after each call, and the list of calls, where there is anything.
Tags are apart, because they are special tokens of some models."""
_DEFINITIONS = ("$defs", "definitions")


def call_grammar(
    tools: Sequence[Tool],
    tool_format: str,
    tokenizer: Tokenizer,
    *,
    is_single: bool,
    instead: str | None = None,
) -> Grammar:
    """The Lark grammar of calls of these tools.

    Args:
        tokenizer: the model's tokenizer, which knows the tags that are special tokens.
        is_single: whether at most one call is allowed.
        instead: the body of a Lark rule for an alternative output without calls; None where a call
            is required.

    Raises:
        InvalidRequest: the grammar is too long. A tool's definitions are repeated for each of its
            arguments, so that the grammar may be much longer than the tools.
    """
    written = partial(lark_literal, tokenizer=tokenizer)

    def between(rule: str, around: _Around) -> str:
        before, after = around.get(tool_format, ((), ()))
        return " ".join((*map(written, before), rule, *map(written, after)))

    calls = "one" if is_single else f"one ({written(_SEPARATORS[tool_format])} one)*"
    rules = ["start: calls" if instead is None else "start: calls | instead"]
    rules += [f"calls: {between(calls, _AROUND_CALLS)}", f"one: {between('call', _AROUND_CALL)}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    num_characters = 0
    for i, tool in enumerate(tools):
        for rule in _call_rules(tool, tool_format, f"call_{i}", written):
            rules.append(rule)
            num_characters += len(rule)
            if num_characters > MAX_GRAMMAR_CHARACTERS:
                raise InvalidRequest(
                    "the grammar of calls of these tools has more than "
                    f"{MAX_GRAMMAR_CHARACTERS} characters",
                    param="tools",
                )
    if instead is not None:
        rules.append(f"instead: {instead}")
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _call_rules(
    tool: Tool, tool_format: str, rule: str, written: Callable[[str], str]
) -> Iterator[str]:
    """The rules of a call of one tool; ``written`` is a tag's literal in the grammar."""
    if tool_format in _ARGUMENTS_FIELD:
        yield f"{rule}: %json {json.dumps(_schema(tool, _ARGUMENTS_FIELD[tool_format]))}"
    elif tool_format.startswith("deepseek"):
        yield from _deepseek_call(tool, rule, written, is_fenced=tool_format == "deepseek_v3")
    else:
        yield from _tagged_call(tool, rule)


def _deepseek_call(
    tool: Tool, rule: str, written: Callable[[str], str], *, is_fenced: bool
) -> Iterator[str]:
    """The rules of a call in one of DeepSeek's formats."""
    call, separator, end = map(
        written, (DeepseekParser.call, DeepseekParser.separator, DeepseekParser.call_end)
    )
    name = json.dumps(tool.function.name, ensure_ascii=False)
    before, after = f"{call} {name} {separator}", end
    if is_fenced:
        named = json.dumps(f"{tool.function.name}\n```json\n", ensure_ascii=False)
        before, after = f'{call} "function" {separator} {named}', f'"\\n```" {end}'
    parameters = {"x-guidance": JSON_STYLE, **(tool.function.parameters or {"type": "object"})}
    yield f"{rule}: {before} {rule}_arguments {after}"
    yield f"{rule}_arguments: %json {json.dumps(parameters)}"


def _tagged_call(tool: Tool, rule: str) -> Iterator[str]:
    """The rules of a call in Qwen3-Coder's format, with the arguments in the schema's order."""
    parameters = tool.function.parameters or {}
    required, properties = parameters.get("required"), parameters.get("properties")
    named = required if isinstance(required, list) else []  # any other type is invalid
    needed = {name for name in named if isinstance(name, str)}
    properties = properties if isinstance(properties, dict) else {}
    parts = []
    for i, name in enumerate(properties):
        parts.append(f"{rule}_{i}" if name in needed else f"{rule}_{i}?")
        opening = json.dumps(f"<parameter={name}>\n")
        yield f"{rule}_{i}: {opening} {rule}_{i}_value"
        yield _tagged_value(parameters, name, f"{rule}_{i}_value")
    opening = json.dumps(f"<function={tool.function.name}>\n")
    yield " ".join([f"{rule}: {opening}", *parts, '"</function>"'])


def _tagged_value(parameters: dict[str, Any], name: str, rule: str) -> str:
    """The rule of an argument's value and closing tag. Strings are written without quotes and
    escapes."""
    schema = parameters["properties"][name]
    end = '"\\n</parameter>\\n"'
    types = types_of(parameters, name)
    if types and "string" not in types:
        definitions = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
        body = json.dumps({"x-guidance": JSON_STYLE, **definitions, **schema})
        return f"{rule}: %json {body} {end}"
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and types == {"string"}:
        texts = [json.dumps(value) for value in values if isinstance(value, str)]
        if texts:
            return f"{rule}: ({' | '.join(texts)}) {end}"
    return f"{rule}[suffix={end}]: /(?s:.*)/"


def _schema(tool: Tool, field_name: str) -> dict[str, Any]:
    """The JSON schema of a call. The definitions in the parameters' schema move to its top level,
    because references are resolved from there."""
    parameters = dict(tool.function.parameters or {"type": "object"})
    names = [name for name in _DEFINITIONS if name in parameters]
    definitions: dict[str, Any] = {name: parameters.pop(name) for name in names}
    return {
        "x-guidance": JSON_STYLE,
        **definitions,
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, field_name: parameters},
        "required": ["name", field_name],
        "additionalProperties": False,
    }
