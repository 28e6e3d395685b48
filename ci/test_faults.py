#!/usr/bin/env python3
"""Runs the fault injection tests, then a soak with random faults of all kinds.

Exits 0 only if the tests pass, and the soak ends without a wrong answer, a leaked block, or a hang.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
FULL_REQUESTS = 5_000
FAULT_TESTS = (
    *("transfers", "endings", "aborts", "messages", "kills", "through_proxy"),
    *("early_pull", "early_pull_kills"),
)
CONNECTORS = {
    "pull": "MooncakeConnector",
    "early": "MooncakeConnector",
    "push": "MooncakeLayerwiseConnector",
}


def main() -> int:
    """Run the tests and the soak; returns the exit status."""
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if not args.soak_only and (status := run_tests()):
        return status
    return 0 if run_soak(args) else 1


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--full", action="store_true", help=f"{FULL_REQUESTS} requests")
    names = tuple(CONNECTORS)
    parser.add_argument(
        "--connector", nargs="+", choices=names, default=names, help="early: early pull"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--soak-only", action="store_true", help="skip the single faults")
    parser.add_argument("--no-kills", action="store_true", help="all faults except SIGKILL")
    parser.add_argument("--log", type=Path, help="file for the instances' output")
    return parser.parse_args()


def run_tests() -> int:
    """Run the tests of single faults, including slow ones; returns pytest's status."""
    folders = [TESTS / "integration" / folder for folder in ("pd", "push")]
    paths = [folder / f"test_{name}.py" for folder in folders for name in FAULT_TESTS]
    files = [path for path in paths if path.exists()]
    command = [sys.executable, "-m", "pytest", "-q", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_soak(args: argparse.Namespace) -> bool:
    """Run the soak; returns whether it passed."""
    with tempfile.TemporaryDirectory() as directory:
        plugins = Path(directory) / "plugins"
        sys.path[:0] = [str(TESTS), str(plugins)]
        path = [str(plugins), str(TESTS), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        import logging

        from support.pd import write_model
        from support.pd_soak import Plan, run_soak as soak
        from support.pd_transport import install

        level = logging.ERROR if args.log is None else logging.INFO
        logging.basicConfig(level=level, filename=args.log)
        install(plugins)
        model = write_model(Path(directory) / "model")
        requests = FULL_REQUESTS if args.full else args.requests
        is_good = True
        for name in args.connector:
            print(f"soak over {name}, seed {args.seed}", flush=True)
            plan = Plan(
                CONNECTORS[name],
                requests,
                args.seed,
                with_kills=not args.no_kills,
                pulls_early=name == "early",
            )
            is_good &= soak(model, plan).is_good
        return is_good


if __name__ == "__main__":
    sys.exit(main())
