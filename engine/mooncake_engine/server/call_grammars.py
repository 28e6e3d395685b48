"""What an answer must look like that calls tools, as a grammar in Lark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.server.protocol import Tool
from mooncake_engine.text.argument_types import types_of
from mooncake_engine.text.grammars import JSON_STYLE

_ARGUMENTS_FIELD = {"hermes": "arguments", "llama3_json": "parameters"}
_TAGGED = ('"<tool_call>\\n" call "\\n</tool_call>"', '"\\n"')
_CALLS = {"hermes": _TAGGED, "qwen3_coder": _TAGGED, "llama3_json": ("call", '"; "')}
"""By form: a call in Lark, and what stands between two of them."""
_DEFINITIONS = ("$defs", "definitions")


def call_grammar(
    tools: Sequence[Tool], tool_format: str, *, is_one: bool, instead: str | None = None
) -> Grammar:
    """Calls of these tools, or ``instead`` of any call something else, as a Lark rule's body."""
    call, separator = _CALLS[tool_format]
    calls = "one" if is_one else f"one ({separator} one)*"
    rules = ["start: calls" if instead is None else "start: calls | instead"]
    rules += [f"calls: {calls}", f"one: {call}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        if tool_format in _ARGUMENTS_FIELD:
            body = json.dumps(_schema(tool, _ARGUMENTS_FIELD[tool_format]))
            rules.append(f"call_{i}: %json {body}")
        else:
            rules += _tagged_call(tool, f"call_{i}")
    if instead is not None:
        rules.append(f"instead: {instead}")
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _tagged_call(tool: Tool, rule: str) -> Iterator[str]:
    """The rules of a call in Qwen3-Coder's form: its arguments in the schema's order."""
    parameters = tool.function.parameters or {}
    required = parameters.get("required") or []
    properties = parameters.get("properties") or {}
    parts = []
    for i, name in enumerate(properties):
        parts.append(f"{rule}_{i}" if name in required else f"{rule}_{i}?")
        opening = json.dumps(f"<parameter={name}>\n")
        yield f"{rule}_{i}: {opening} {rule}_{i}_value"
        yield _tagged_value(parameters, name, f"{rule}_{i}_value")
    opening = json.dumps(f"<function={tool.function.name}>\n")
    yield " ".join([f"{rule}: {opening}", *parts, '"</function>"'])


def _tagged_value(parameters: dict[str, Any], name: str, rule: str) -> str:
    """The rule of an argument with its closing tag: strings have no quotes and no escapes."""
    schema = parameters["properties"][name]
    end = '"\\n</parameter>\\n"'
    types = types_of(parameters, name)
    if types and "string" not in types:
        definitions = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
        body = json.dumps({"x-guidance": JSON_STYLE, **definitions, **schema})
        return f"{rule}: %json {body} {end}"
    texts = schema.get("enum") if isinstance(schema, dict) else None
    if texts and types == {"string"}:
        return f"{rule}: ({' | '.join(json.dumps(text) for text in texts)}) {end}"
    return f"{rule}[suffix={end}]: /(?s:.*)/"


def _schema(tool: Tool, field_name: str) -> dict[str, Any]:
    """A call as a schema. Definitions move up with it, because references start at the top."""
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
