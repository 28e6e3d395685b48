"""Finds the type of a tool argument that the model wrote without quotes, from the tool's JSON
schema; used by ``Qwen3CoderParser``."""

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
"""Constants by their lower-case spelling: JSON's, and Python's, which models also write."""
_MAX_PARTS = 1024
"""The most subschemas of one parameter that are searched for types; the rest is ignored."""


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty where its schema does not say.

    Args:
        parameters: the JSON schema of the tool's parameters.
        name: the parameter.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    found: set[str] = set()
    parts: list[Any] = [properties.get(name)]
    seen: set[int] = set()
    for schema in parts:  # the loop appends to parts
        if len(seen) == _MAX_PARTS:
            break
        if isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            found |= _own_types(schema)
            parts += _parts(schema, parameters)
    return frozenset(found)


def encode_argument(text: str, types: frozenset[str]) -> str:
    """Encode an argument as JSON: as a value of one of the types if the text can be read as one,
    otherwise as a string."""
    if types - {"string"}:
        for value in _readings(text.strip()):
            encoded = _encode(value, types)
            if encoded is not None:
                return encoded
    return json.dumps(text, ensure_ascii=False)


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema states itself. Keywords that are null or of a wrong type are ignored,
    because clients write them in place of a missing value."""
    stated = schema.get("type")
    kinds = {kind for kind in (stated, *_items(stated)) if isinstance(kind, str)}
    if kinds:
        return kinds
    values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return {_KINDS[type(value)] for value in values if type(value) in _KINDS}


def _parts(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[Any]:
    """The subschemas that a schema combines or refers to."""
    for word in ("anyOf", "oneOf", "allOf"):
        yield from _items(schema.get(word))
    if isinstance(schema.get("$ref"), str):
        yield _referred(schema["$ref"], whole)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, whole: Mapping[str, Any]) -> Any:
    """The target of a reference within the schema; None for any other reference."""
    first, *steps = reference.split("/")
    found: Any = whole if first == "#" else None
    for step in steps:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _readings(text: str) -> Iterator[Any]:
    """The values that a text can be read as, the most likely first."""
    if text.lower() in _WORDS:
        yield _WORDS[text.lower()]
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        if text[:1] in ("[", "{"):  # may be a Python literal
            try:
                yield ast.literal_eval(text)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                return


def _encode(value: Any, types: frozenset[str]) -> str | None:
    """A value as JSON; None if it has none of the types."""
    kind = _KINDS.get(type(value))
    if kind == "number" and math.isfinite(value) and value == int(value) and "number" not in types:
        value, kind = int(value), "integer"
    is_number = kind == "integer" and "number" in types
    is_missing = kind == "null" and "string" not in types
    if kind == "string" or not (kind in types or is_number or is_missing):
        return None
    try:
        return to_json(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def to_json(value: Any, *, allow_nan: bool = True) -> str:
    """A value as JSON, with characters as they are. Where halves of surrogate pairs are among them,
    which UTF-8 can't encode, all that are not ASCII are escaped. Raises as ``json.dumps``."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    return text if is_unicode(text) else json.dumps(value, allow_nan=allow_nan)


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
