"""Checks calls of torch-npu against the op schemas of its versions, without torch-npu.

The base is the registered schemas of 2.13.0, as the emulated NPU uses them; ``versions.json`` lists
the differences of other versions, from the op descriptions in their wheels (without the overloads
by dimension name, which no current torch can parse).
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent
BASE = TESTS / "support/npu_emulation/torch_npu/schemas.json"
CHANGES = TESTS / "contract/ascend/versions.json"

_MODULE_NAMES = ("torch.npu", "torch_npu.npu", "npu")
"""Functions through which the backend's modules call ``torch_npu.npu``."""

_IS_OP = re.compile(r"_?npu_\w+")
_LITERALS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "SymInt": (int,),
    "float": (float, int),
    "number": (float, int),
    "bool": (bool,),
    "str": (str,),
    "Tensor": (),
    "Device": (str,),
    "ScalarType": (),
}


@dataclass(frozen=True)
class Schemas:
    """The API of one version of torch-npu.

    Args:
        version: of the package.
        ops: overloads by the op's name.
        module: public names of ``torch_npu.npu``.
    """

    version: str
    ops: Mapping[str, list[Any]]
    module: frozenset[str]


@lru_cache(maxsize=1)
def all_versions() -> tuple[Schemas, ...]:
    """Every version that the backend is checked against."""
    base = json.loads(BASE.read_text())
    known = json.loads(CHANGES.read_text())
    assert known["base"] == base["version"]
    return tuple(
        Schemas(
            version,
            _parsed(_changed(base["schemas"], changes["ops"])),
            frozenset(_changed(known["module"], changes["module"])),
        )
        for version, changes in known["versions"].items()
    )


def _changed(names: list[str], changes: Mapping[str, list[str]]) -> list[str]:
    assert set(changes["removed"]) <= set(names), "a removed name is not in the base version"
    return [name for name in names if name not in changes["removed"]] + changes["added"]


def _parsed(schemas: list[str]) -> dict[str, list[Any]]:
    found = defaultdict(list)
    for text in schemas:
        schema = torch._C.parse_schema(text)
        found[schema.name.split("::")[1]].append(schema)
    return dict(found)


def check_source(text: str, schemas: Schemas) -> list[str]:
    """Return the errors in a module's calls of torch-npu, one sentence each."""
    return [
        f"line {node.lineno}: {problem}"
        for node in ast.walk(ast.parse(text))
        for problem in _problems(node, schemas)
    ]


def count_calls(text: str) -> int:
    """Return the number of op calls in a module."""
    return sum(
        isinstance(node, ast.Call) and _op(node.func) is not None
        for node in ast.walk(ast.parse(text))
    )


def _problems(node: ast.AST, schemas: Schemas) -> Iterator[str]:
    if (
        isinstance(node, ast.Attribute)
        and _dotted(node.value) in _MODULE_NAMES
        and node.attr not in schemas.module
    ):
        yield f"torch_npu {schemas.version} has no torch.npu.{node.attr}"
    if isinstance(node, ast.Call) and (op := _op(node.func)) is not None:
        yield from _call_problems(node, op, schemas)


def _call_problems(node: ast.Call, op: tuple[str, str | None], schemas: Schemas) -> Iterator[str]:
    name, overload = op
    known = schemas.ops.get(name)
    if known is None:
        yield f"torch_npu {schemas.version} has no op {name}"
        return
    wanted = {"default": ""}.get(overload or "", overload)
    refusals = []
    for schema in known:
        if wanted is not None and schema.overload_name != wanted:
            continue
        refusal = _mismatch(node, schema)
        if refusal is None:
            return
        refusals.append(refusal)
    reason = "; ".join(refusals) or f"it has no overload {overload}"
    yield f"{name} of torch_npu {schemas.version}: {reason}"


def _mismatch(node: ast.Call, schema: Any) -> str | None:
    """Why a call does not match a schema; None if it does as far as static checks can tell."""
    arguments = {argument.name: argument for argument in schema.arguments}
    ordered = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    is_open = any(isinstance(value, ast.Starred) for value in node.args) or any(
        word.arg is None for word in node.keywords
    )
    positional = [value for value in node.args if not isinstance(value, ast.Starred)]
    if len(positional) > len(ordered):
        return f"takes {len(ordered)} arguments by position, not {len(positional)}"
    given = dict(zip(ordered, positional, strict=False))
    for word in node.keywords:
        if word.arg is None:
            continue
        if word.arg not in arguments:
            return f"unknown keyword {word.arg!r}"
        if word.arg in given:
            return f"{word.arg!r} is given twice"
        given[word.arg] = word.value
    missing = [
        name
        for name, argument in arguments.items()
        if name not in given and not argument.has_default_value()
    ]
    if missing and not is_open:
        return f"missing {missing}"
    wrong = [name for name, value in given.items() if not _fits(value, arguments[name].type)]
    return f"arguments {wrong} are of the wrong type" if wrong else None


def _fits(value: ast.expr, kind: Any) -> bool:
    """Whether a literal is of a type; other expressions are left to the meta kernels."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        value = value.operand
    if isinstance(value, ast.Constant):
        return _constant_fits(value.value, kind)
    if isinstance(value, (ast.List, ast.Tuple, ast.ListComp)):
        inner = kind.getElementType() if kind.kind() == "OptionalType" else kind
        if inner.kind() != "ListType":
            return False
        items = [] if isinstance(value, ast.ListComp) else value.elts
        return all(_fits(item, inner.getElementType()) for item in items)
    return not isinstance(value, (ast.Dict, ast.Set, ast.JoinedStr)) or _is_text(value, kind)


def _is_text(value: ast.expr, kind: Any) -> bool:
    return isinstance(value, ast.JoinedStr) and "str" in str(kind)


def _constant_fits(value: object, kind: Any) -> bool:
    if kind.kind() == "OptionalType":
        return value is None or _constant_fits(value, kind.getElementType())
    types = _LITERALS.get(str(kind))
    if types is None:  # a list, or a type without literals
        return False
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types)


def _op(function: ast.expr) -> tuple[str, str | None] | None:
    """Return (op, overload) if this is one of torch-npu's ops; the overload may be unspecified."""
    parts = _dotted(function).split(".")
    if parts[0] not in ("torch_npu", "torch"):
        return None
    named = [at for at, part in enumerate(parts) if at and _IS_OP.fullmatch(part)]
    if not named:
        return None
    rest = parts[named[-1] + 1 :]
    return (parts[named[-1]], rest[0] if rest else None) if len(rest) < 2 else None


def _dotted(node: ast.expr) -> str:
    """Return such an expression as ``"a.b.c"``; empty for any other."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""
