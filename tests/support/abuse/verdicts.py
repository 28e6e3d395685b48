"""An attack's effects on a deployment, and whether they are within its bounds. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
SHOWN = 3
"""Number of reasons of one kind that are listed."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of an attack's effects on others. Lost processes and wrong answers are never allowed.

    Args:
        growth_mib: growth of any process' peak memory.
        silence_s: longest time for which a process that is not stopped left ``/health`` unanswered.
        unanswered: number of failed ordinary requests.
    """

    growth_mib: int = 64
    silence_s: float = 5.0
    unanswered: int = 0

    def slacken(self, factor: float) -> Bounds:
        """Bounds for a busy machine: the times are multiplied, everything else stays."""
        return Bounds(self.growth_mib, self.silence_s * factor, self.unanswered)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of several processes, and the process' name."""

    value: float = 0.0
    whose: str = ""

    def or_larger(self, value: float, whose: str) -> Largest:
        """The larger of this value and another one."""
        return Largest(value, whose) if value > self.value else self


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table.

    Args:
        attack: its name.
        tries: number of tries.
        lost: processes that exited.
        right: number of ordinary requests whose answers were the same as before, token for token.
        wrong: other answers to ordinary requests.
        unanswered: errors of ordinary requests.
        growth_mib: growth of peak memory.
        silence_s: longest silence of ``/health``.
        complaints: violations that the attack itself detected.
        bounds: limits of all these.
    """

    attack: str
    tries: int
    lost: tuple[str, ...]
    right: int
    wrong: tuple[str, ...]
    unanswered: tuple[str, ...]
    growth_mib: Largest
    silence_s: Largest
    complaints: tuple[str, ...]
    bounds: Bounds


def problems(outcome: Outcome) -> list[str]:
    """Reasons why this outcome fails; empty if it passes."""
    bounds, found = outcome.bounds, []
    if not outcome.tries:
        found.append("nothing was tried")
    if not outcome.right:
        found.append("no ordinary request was answered, so nothing was compared")
    if outcome.lost:
        found.append(f"lost: {_some(outcome.lost)}")
    if outcome.wrong:
        found.append(f"wrong answers to others: {_some(outcome.wrong)}")
    if len(outcome.unanswered) > bounds.unanswered:
        found.append(
            f"{len(outcome.unanswered)} ordinary requests failed, at most {bounds.unanswered} may: "
            f"{_some(outcome.unanswered)}"
        )
    growth, silence = outcome.growth_mib, outcome.silence_s
    if growth.value > bounds.growth_mib:
        found.append(f"{growth.whose} grew by {growth.value:.0f} of {bounds.growth_mib} MiB")
    if silence.value > bounds.silence_s:
        found.append(f"{silence.whose} was silent for {silence.value:.1f} of {bounds.silence_s} s")
    if outcome.complaints:
        found.append(f"seen by the attack: {_some(outcome.complaints)}")
    return found


HEAD = ("attack", "tries", "lost", "wrong", "failed", "right", "growth MiB", "silence s", "")
WIDTHS = (26, 8, 6, 7, 8, 7, 12, 12, 6)


def head() -> str:
    """Names of the columns."""
    return _line(HEAD)


def row(outcome: Outcome) -> str:
    """One line of the table with bounds beside the values; if it fails, the reasons follow."""
    found, bounds = problems(outcome), outcome.bounds
    cells = (
        outcome.attack,
        str(outcome.tries),
        str(len(outcome.lost)),
        str(len(outcome.wrong)),
        f"{len(outcome.unanswered)}/{bounds.unanswered}",
        str(outcome.right),
        f"{outcome.growth_mib.value:.0f}/{bounds.growth_mib}",
        f"{outcome.silence_s.value:.1f}/{bounds.silence_s:g}",
        "FAIL" if found else "ok",
    )
    return "\n".join([_line(cells), *(f"    {reason}" for reason in found)])


def summary(outcomes: Sequence[Outcome]) -> str:
    """The last line of a report."""
    failed = [outcome.attack for outcome in outcomes if problems(outcome)]
    tries = sum(outcome.tries for outcome in outcomes)
    end = f"FAILED: {', '.join(failed)}" if failed else "all within their bounds"
    return f"{len(outcomes)} attacks, {tries} tries: {end}"


def _line(cells: Sequence[str]) -> str:
    name, *others = cells
    figures = zip(others, WIDTHS[1:], strict=True)
    line = "".join(f"{cell:>{width}}" for cell, width in figures)
    return (
        f"{name}\n{'':<{WIDTHS[0]}}{line}"
        if len(name) > WIDTHS[0]
        else f"{name:<{WIDTHS[0]}}{line}"
    )


def _some(reasons: Sequence[str]) -> str:
    more = f" and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return "; ".join(reason[:400] for reason in reasons[:SHOWN]) + more
