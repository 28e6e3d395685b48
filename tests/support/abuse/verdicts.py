"""What an attack did to a deployment, and whether that is within its bounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
SHOWN = 3
"""Reasons of one kind that are written out."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an attack may do to others. An instance lost and a wrong answer have no bound but zero.

    Args:
        growth_mib: peak memory of any process, above what it held before.
        silence_s: longest time that any process that is not stopped left ``/health`` unanswered.
        unanswered: ordinary requests that get an error.
    """

    growth_mib: int = 64
    silence_s: float = 5.0
    unanswered: int = 0

    def slacken(self, factor: float) -> Bounds:
        """For a machine that does other things meanwhile: times are longer, the rest stays."""
        return Bounds(self.growth_mib, self.silence_s * factor, self.unanswered)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest figure of several processes, and whose it is."""

    value: float = 0.0
    whose: str = ""

    def or_larger(self, value: float, whose: str) -> Largest:
        """This one, or that."""
        return Largest(value, whose) if value > self.value else self


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table.

    Args:
        attack: its name.
        tries: how often it was tried.
        lost: processes that ended.
        right: ordinary requests that were answered, token for token as before.
        wrong: what ordinary requests got instead.
        unanswered: ordinary requests that got an error.
        growth_mib: peak memory growth.
        silence_s: longest silence of ``/health``.
        complaints: what the attack itself saw that may not be.
        bounds: of all this.
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
    """Why this outcome fails; empty if it does not."""
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
    """One line of the table, its bounds beside the figures, and the reasons below if it fails."""
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
    """One line at the end."""
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
