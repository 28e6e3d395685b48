"""Decodes the body of a request, and explains to the client what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect

from mooncake_api.errors import RequestRejected

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a body raises. Fields that a type does not declare are skipped unread: what they
contain may raise these only when they are decoded themselves."""

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`")
_FLOAT_FOR_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MAX_INTEGER = 2**63
_NOT_SUPPORTED = "Expected `null`"
_NOT_LISTED = ("Invalid enum value", "Invalid value")


def explain(exc: Exception, request_type: type[msgspec.Struct]) -> RequestRejected:
    """The rejection of a body that could not be decoded.

    Args:
        exc: one of ``DECODE_ERRORS``.
        request_type: the type of the body, which knows the values that a field may have.
    """
    path, problem = path_in(exc), _problem(exc)
    if missing := _MISSING.match(problem):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return RequestRejected(f"{path} is required", param=path)
    if not path:
        return RequestRejected(f"the body must be a JSON object: {_lower(problem)}")
    if problem.startswith(_NOT_SUPPORTED):
        return RequestRejected(
            f"{path} is not supported by this server; leave it out or send null", param=path
        )
    if problem.startswith(_NOT_LISTED) and (accepted := _accepted(request_type, path)):
        problem += f"; wanted {', '.join(accepted)}"
    return RequestRejected(f"{path}: {_lower(problem)}", param=path)


def decode_fields(body: bytes, request_type: type[msgspec.Struct]) -> dict[str, Any]:
    """Decode the fields of a body, whether its type declares them or not.

    Raises:
        RequestRejected: the body is not a JSON object, or a value is malformed.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS as exc:
        raise explain(exc, request_type) from exc
    return {name: decode_field(name, value) for name, value in found.items()}


def decode_field(name: str, value: msgspec.Raw) -> Any:
    """Decode a field that the body's type does not declare.

    Raises:
        RequestRejected: the value is malformed; the message names the field.
    """
    try:
        return msgspec.json.decode(value)
    except DECODE_ERRORS as exc:
        raise RequestRejected(f"{name}: {_lower(_problem(exc))}", param=name) from exc


def is_float_for_integer(exc: Exception) -> bool:
    """Whether a float stands where an integer is wanted."""
    return _FLOAT_FOR_INTEGER.match(str(exc)) is not None


def with_integers(body: bytes, request_type: type[msgspec.Struct]) -> bytes | None:
    """A body whose integer fields have integers where they had floats without a fraction, such as
    ``2.0`` of languages with one type of numbers; None if it has no such floats, or is malformed.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        names = _integer_fields(request_type) & found.keys()
        values = {name: msgspec.json.decode(found[name]) for name in names}
    except DECODE_ERRORS:
        return None
    changed = {}
    for name, value in values.items():
        if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_INTEGER:
            changed[name] = msgspec.Raw(b"%d" % int(value))
    return msgspec.json.encode(found | changed) if changed else None


@cache
def _integer_fields(request_type: type[msgspec.Struct]) -> frozenset[str]:
    struct = msgspec.inspect.type_info(request_type)
    assert isinstance(struct, msgspec.inspect.StructType)
    return frozenset(
        field.encode_name
        for field in struct.fields
        if any(isinstance(kind, msgspec.inspect.IntType) for kind in _alternatives([field.type]))
    )


def path_in(exc: Exception) -> str:
    """The path of the field at fault, such as ``messages[0].role``; empty if there is none."""
    found = _PATH.search(str(exc)) if isinstance(exc, msgspec.ValidationError) else None
    return found["path"] if found else ""


def _problem(exc: Exception) -> str:
    """What is wrong, without the path."""
    if isinstance(exc, RecursionError):
        return "it is nested too deeply"
    if isinstance(exc, UnicodeDecodeError):
        return f"it is not UTF-8: invalid byte 0x{exc.object[exc.start]:02x}"
    return _PATH.sub("", str(exc))


def _lower(problem: str) -> str:
    return problem if problem.startswith("JSON") else f"{problem[0].lower()}{problem[1:]}"


def _accepted(request_type: type[msgspec.Struct], path: str) -> list[str]:
    """The values that are accepted at a path of a body, if they are listed; msgspec names only the
    value that is wrong."""
    kinds = [msgspec.inspect.type_info(request_type)]
    for step in re.findall(r"[^.\[\]]+|\[", path):
        if not step.isdigit():
            kinds = [inner for kind in _alternatives(kinds) for inner in _inner(kind, step)]
    accepted: list[str] = []
    for kind in _alternatives(kinds):
        if isinstance(kind, msgspec.inspect.LiteralType):
            accepted += map(str, kind.values)
        elif isinstance(kind, msgspec.inspect.EnumType):
            accepted += (str(each.value) for each in kind.cls)
    return accepted


def _alternatives(kinds: Iterable[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    for kind in kinds:
        yield from kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _inner(kind: msgspec.inspect.Type, step: str) -> Iterator[msgspec.inspect.Type]:
    """The types that a type has one step further along a path: a field, or ``[`` for an item."""
    if isinstance(kind, msgspec.inspect.ListType) and step == "[":
        yield kind.item_type
    if isinstance(kind, msgspec.inspect.StructType):
        if step == kind.tag_field:
            yield msgspec.inspect.LiteralType((str(kind.tag),))
        yield from (field.type for field in kind.fields if field.encode_name == step)
