"""Speed figures: recorded by benchmarks, checked by ``ci/bench.py`` and ``ci/device_stages.py``.

Standard library only: stages check figures before any other package is importable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIGURES_FILE = "MOONCAKE_FIGURES"
"""Environment variable that names the file to which each figure is appended once it is recorded, so
that an interrupted run loses none."""


@dataclass(frozen=True)
class Figure:
    """A measured value and its bound.

    Args:
        name: of the figure.
        value: as measured.
        wanted: the bound; None: shown for comparison, always passes.
        unit: of both.
        at_least: whether the bound is a lower one; otherwise it is an upper one.
        context: what the value is compared with, for the table.
    """

    name: str
    value: float
    wanted: float | None
    unit: str
    at_least: bool = True
    context: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within its bound."""
        if self.wanted is None:
            return True
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    @property
    def bound(self) -> str:
        """Sign and bound; empty without a bound."""
        if self.wanted is None:
            return ""
        return f"{'≥' if self.at_least else '≤'} {_number(self.wanted)}"

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "missed"
        line = f"{self.name:<44} {_number(self.value):>10} {self.unit:<8} {self.bound}  {verdict}"
        return f"{line}  ({self.context})" if self.context else line


def record(benchmark: Any, figure: Figure) -> None:
    """Attach one of possibly several figures to a benchmark's report; append it to FIGURES_FILE."""
    benchmark.extra_info.setdefault("figures", []).append(asdict(figure))
    if path := os.environ.get(FIGURES_FILE):
        with Path(path).open("a") as lines:
            lines.write(json.dumps(asdict(figure)) + "\n")


def read_figures(path: Path) -> list[Figure]:
    """The figures recorded so far, without a line that is still being written."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [Figure(**json.loads(line)) for line in whole.splitlines()]


def as_markdown(figures: Sequence[Figure]) -> str:
    """The figures as a table for docs/benchmarks.md."""
    rows = ["| figure | measured | bound | details |", "|---|---|---|---|"]
    for figure in figures:
        verdict = "" if figure.holds else "**missed**; "
        value = f"{_number(figure.value)} {figure.unit}"
        rows.append(f"| {figure.name} | {value} | {figure.bound} | {verdict}{figure.context} |")
    return "\n".join(rows) + "\n"


def _number(value: float) -> str:
    """Three significant digits, without an exponent for large numbers."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
