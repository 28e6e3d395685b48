"""Lists and runs the legs of CI; .github/workflows/ci.yml runs the same commands.

python ci/matrix.py                  list them
python ci/matrix.py run [LEG ...]    run them (default: all) and print a line for each at the end

Exits 1 if a leg failed, else 77 if one was skipped because its hardware is missing, else 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg.

    Args:
        name: the leg's name.
        runner: label of the machines that CI runs it on.
        commands: run one after the other in the repository's root.
    """

    name: str
    runner: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a leg: exit status, last line of output, and seconds."""

    leg: Leg
    status: int
    last_line: str
    seconds: float


def read_legs() -> dict[str, Leg]:
    """All legs by name."""
    legs = json.loads((ROOT / "ci" / "matrix.json").read_text())["legs"]
    return {leg["name"]: Leg(leg["name"], leg["runner"], tuple(leg["commands"])) for leg in legs}


def run_leg(leg: Leg) -> Outcome:
    """Run a leg's commands until one exits with another status than 0; their output is printed."""
    begin, status, last_line = time.monotonic(), 0, ""
    for command in leg.commands:
        print(f"== {leg.name}: {command}", flush=True)
        status, last_line = _run(command)
        if status:
            break
    return Outcome(leg, status, last_line, time.monotonic() - begin)


def _run(command: str) -> tuple[int, str]:
    last_line = ""
    with subprocess.Popen(
        command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last_line = line.strip() or last_line
    return process.returncode, last_line


def summary(outcomes: Sequence[Outcome]) -> tuple[int, list[str]]:
    """The overall exit status, and a line for each leg."""
    words = {0: "ok", SKIPPED: "skipped"}
    lines = [
        f"{words.get(outcome.status, 'FAILED'):8} {outcome.leg.name:10} "
        f"{outcome.seconds:6.0f} s  {outcome.last_line}"
        for outcome in outcomes
    ]
    statuses = {outcome.status for outcome in outcomes}
    if statuses - {0, SKIPPED}:
        return 1, lines
    return (SKIPPED if SKIPPED in statuses else 0), lines


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    legs = read_legs()
    if not argv:
        for leg in legs.values():
            print(f"{leg.name:10} {leg.runner:13} {' && '.join(leg.commands)}")
        return 0
    if argv[0] != "run" or set(argv[1:]) - set(legs):
        print(f"{__doc__}\nlegs: {', '.join(legs)}", file=sys.stderr)
        return 2
    status, lines = summary([run_leg(legs[name]) for name in argv[1:] or legs])
    print("\n".join(["", *lines]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
