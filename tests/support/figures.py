"""Speed figures with a bound: recorded by benchmarks, checked by ``ci/bench.py``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured value and its bound.

    Args:
        name: of the figure.
        value: as measured.
        wanted: the bound.
        unit: of both.
        at_least: whether more is better; else less is.
        context: what it was measured against, for the table.
    """

    name: str
    value: float
    wanted: float
    unit: str
    at_least: bool = True
    context: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within its bound."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "ok" if self.holds else "missed"
        bound = f"{sign} {self.wanted:.3g}"
        line = f"{self.name:<44} {self.value:>10.3g} {self.unit:<8} {bound}  {verdict}"
        return f"{line}  ({self.context})" if self.context else line


def record(benchmark: Any, figure: Figure) -> None:
    """Attach a figure to a benchmark's report; a benchmark may have several."""
    benchmark.extra_info.setdefault("figures", []).append(asdict(figure))
