"""What type an argument has that was written without quotes, by its tool's JSON schema. Pure."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Also as Python writes them, in which models think."""
_DEEPEST = 8


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON's types that a parameter may have; empty where its schema says nothing.

    Args:
        parameters: the tool's JSON schema.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return frozenset(_types(properties.get(name), parameters, _DEEPEST))


def encode_argument(text: str, types: frozenset[str]) -> str:
    """An argument as JSON: of one of these types if the text is one, else a string."""
    if types - {"string"}:
        for value in _readings(text.strip()):
            encoded = _encode(value, types)
            if encoded is not None:
                return encoded
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, whole: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    stated = schema.get("type", [])
    yield from (kind for kind in ([stated] if isinstance(stated, str) else stated))
    if "type" not in schema:
        values = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
        yield from (_KINDS[type(value)] for value in values if type(value) in _KINDS)
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(word, []):
            yield from _types(part, whole, depth - 1)
    if isinstance(schema.get("$ref"), str):
        yield from _types(_referred(schema["$ref"], whole), whole, depth - 1)


def _referred(reference: str, whole: Mapping[str, Any]) -> Any:
    """What a reference within the schema means; None for others."""
    first, *steps = reference.split("/")
    found: Any = whole if first == "#" else None
    for step in steps:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _readings(text: str) -> Iterator[Any]:
    """What a text may mean, as a value."""
    if text.lower() in _WORDS:
        yield _WORDS[text.lower()]
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        if text[:1] in ("[", "{"):  # as Python writes it
            try:
                yield ast.literal_eval(text)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                return


def _encode(value: Any, types: frozenset[str]) -> str | None:
    """A value as JSON, if it is of one of these types."""
    kind = _KINDS.get(type(value))
    if kind == "number" and math.isfinite(value) and value == int(value) and "number" not in types:
        value, kind = int(value), "integer"
    is_number = kind == "integer" and "number" in types
    is_missing = kind == "null" and "string" not in types
    if kind == "string" or not (kind in types or is_number or is_missing):
        return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
