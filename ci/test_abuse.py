#!/usr/bin/env python3
"""Attacks a running deployment: two instances of each role and a proxy with two workers.

During each attack, ordinary traffic runs, whose answers are compared token by token. Prints one
line per attack: tries, lost processes, wrong answers to others, failed and correct ordinary
requests, peak memory growth, and the longest time without an answer of /health, each with its
bound. Exits 1 with the reason if a bound is missed. Everything stays on the loopback interface, and
ends by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
)

from support.abuse.campaign import Plan, run_each, soak  # noqa: E402  # the path is set above
from support.abuse.catalogue import ATTACKS, BY_NAME  # noqa: E402
from support.abuse.verdicts import Outcome, head, problems, row, summary  # noqa: E402

SHORT_S, EACH_S, ROUND_S = 1.5, 10.0, 20.0
SOAK_MINUTES = 30.0


def main() -> int:
    """Run the requested attacks; returns the exit status."""
    args = parse_args()
    if args.list:
        for attack in ATTACKS:
            print(f"{attack.name:<26}{attack.about}")
        return 0
    chosen = [BY_NAME[name] for name in args.only] if args.only else list(ATTACKS)
    if args.short:
        chosen = [attack for attack in chosen if attack.is_short]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        scratch = args.log_dir or Path(directory)
        scratch.mkdir(parents=True, exist_ok=True)
        default_s = SHORT_S if args.short else ROUND_S if args.soak else EACH_S
        plan = Plan(args.seconds or default_s, args.seed, args.slack, scratch)
        print(f"seed {args.seed}\n{head()}", flush=True)
        if args.soak:
            outcomes = soak(chosen, args.soak, plan, show)
        else:
            outcomes = run_each(chosen, plan, show)
    print(f"{summary(outcomes)}, {time.monotonic() - began:.0f} s", flush=True)
    return int(any(problems(outcome) for outcome in outcomes))


def show(outcome: Outcome) -> None:
    """Print the row of a finished attack."""
    print(row(outcome), flush=True)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="print the attacks and exit")
    add("--only", nargs="+", choices=tuple(BY_NAME), metavar="NAME", help="run only these attacks")
    add("--short", action="store_true", help=f"run some attacks only, {SHORT_S:g} s each")
    add("--seconds", type=float, help=f"seconds per attack (default: {EACH_S:g})")
    add(
        "--soak",
        type=float,
        nargs="?",
        const=SOAK_MINUTES,
        metavar="MINUTES",
        help=f"run several attacks at once for MINUTES (default: {SOAK_MINUTES:g})",
    )
    add("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    add("--slack", type=float, default=1.0, help="factor for time limits on a busy machine")
    add("--log-dir", type=Path, help="folder for the logs of all processes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
