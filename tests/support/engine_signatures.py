"""The Python surface of the vendors' transfer engines, from what pybind11 says of it."""

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
"""What hccs uses of each module, beside the enumeration that follows."""
OPERATIONS = ("SDMA", "DEVICE_RDMA")


@dataclass(frozen=True)
class Signature:
    """A function's parameters.

    Args:
        names: of all; those of mooncake's have none but ``arg0``, ``arg1``.
        num_required: how many have no default.
    """

    names: tuple[str, ...]
    num_required: int

    @classmethod
    def of(cls, text: str) -> Signature:
        """Read ``"name(self: T, a: int, b: int = 0) -> int"``."""
        inner = text[text.index("(") + 1 : text.rindex(")")]
        plain = re.sub(r"\[[^][]*\]", "", re.sub(r"<[^<>]*>", "x", inner))
        parts = [part.strip() for part in plain.split(",") if part.strip()]
        own = [part for part in parts if not part.startswith("self")]
        names = tuple(part.partition(":")[0].strip() for part in own)
        return cls(names, sum("=" not in part for part in own))

    def mismatch(self, num_positional: int, keywords: set[str]) -> str | None:
        """Say why a call does not fit, or None."""
        unknown = keywords - set(self.names[num_positional:])
        if unknown:
            return f"has no parameters {sorted(unknown)} left"
        if num_positional > len(self.names):
            return f"takes {len(self.names)} arguments, not {num_positional}"
        missing = set(self.names[num_positional : self.num_required]) - keywords
        return f"lacks {sorted(missing)}" if missing else None


def surface(module: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Signatures of a live module's functions and of its classes' methods."""
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
    """The first line of what pybind11 documents; of overloads the first."""
    lines = [line for line in (function.__doc__ or "").splitlines() if "->" in line]
    return re.sub(r"^\d+\. ", "", lines[0].strip()) if lines else ""


def check_calls(source: str, owner: str, surface: Mapping[str, str]) -> list[str]:
    """Return which calls of ``self._engine.x(...)`` in a class do not fit the surface."""
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
        count = len(node.args) + 2 * starred  # _lists() has three
        keywords = {word.arg for word in node.keywords if word.arg}
        problem = Signature.of(surface[name]).mismatch(count, keywords)
        if problem is not None:
            problems.append(f"{name} {problem}")
    return problems
