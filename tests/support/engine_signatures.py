"""The Python API of the vendors' transfer engines, as pybind11 documents it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parent.parent / "contract/ascend/engines.json"
USED = {
    "mooncake": ("TransferEngine",),
    "memfabric": ("TransferEngine", "get_and_clear_last_err_msg"),
}
"""The methods that hccs calls on each module, besides the enumeration below."""
OPERATIONS = ("SDMA", "DEVICE_RDMA")


@dataclass(frozen=True)
class Signature:
    """A function's parameters.

    Args:
        names: of all parameters; mooncake's have only ``arg0``, ``arg1``.
        num_required: how many have no default.
    """

    names: tuple[str, ...]
    num_required: int

    @classmethod
    def of(cls, text: str) -> Signature:
        """Parse ``"name(self: T, a: int, b: int = 0) -> int"``."""
        inner = text[text.index("(") + 1 : text.rindex(")")]
        plain = re.sub(r"\[[^][]*\]", "", re.sub(r"<[^<>]*>", "x", inner))
        parts = [part.strip() for part in plain.split(",") if part.strip()]
        own = [part for part in parts if not part.startswith("self")]
        names = tuple(part.partition(":")[0].strip() for part in own)
        return cls(names, sum("=" not in part for part in own))

    def mismatch(self, num_positional: int, keywords: set[str]) -> str | None:
        """Why a call does not match this signature; None if it does."""
        unknown = keywords - set(self.names[num_positional:])
        if unknown:
            return f"has no parameters {sorted(unknown)} left"
        if num_positional > len(self.names):
            return f"takes {len(self.names)} arguments, not {num_positional}"
        missing = set(self.names[num_positional : self.num_required]) - keywords
        return f"lacks {sorted(missing)}" if missing else None


def surface(module: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Signatures of the functions, and of the classes' methods, in an imported module."""
    found = {}
    for name in names:
        member = getattr(module, name)
        if not isinstance(member, type):
            found[name] = _signature(member)
            continue
        for method in sorted(vars(member)):
            signature = _signature(getattr(member, method))
            if not method.startswith("_") and signature:
                found[f"{name}.{method}"] = signature
    return found


def _signature(function: Any) -> str:
    """The first line of pybind11's docstring; the first overload only."""
    lines = [line for line in (function.__doc__ or "").splitlines() if "->" in line]
    return re.sub(r"^\d+\. ", "", lines[0].strip()) if lines else ""


def check_calls(source: str, owner: str, surface: Mapping[str, str]) -> list[str]:
    """Return the calls of ``self._engine.x(...)`` in a class that don't match the API."""
    tree = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == owner
    )
    problems = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) not in ("self._engine", "engine"):
            continue
        name = f"TransferEngine.{node.func.attr}"
        if name not in surface:
            problems.append(f"{name} does not exist")
            continue
        starred = any(isinstance(value, ast.Starred) for value in node.args)
        count = len(node.args) + 2 * starred  # _lists() returns three values
        keywords = {word.arg for word in node.keywords if word.arg}
        problem = Signature.of(surface[name]).mismatch(count, keywords)
        if problem is not None:
            problems.append(f"{name} {problem}")
    return problems
