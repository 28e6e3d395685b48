"""Tests our connector inside vLLM's CPU build: tokens, counters, and the release of blocks.

    python ci/test_vllm.py [--parts unit,pairs] [--pairs 1:1/shm,2:1/tcp,1:2/shm/push]
        [--pairs 1:1/shm/pull/recompute/sliding]

Parts:
    unit: tests/vllm, with vLLM's own scheduler and views but without a server.
    up: what ``make up ENGINE=vllm`` starts.
    pool: the pool's connector.
    multi: vLLM's MultiConnector with ours in it.
    mixed: P on vLLM with D on our own engine, and vice versa, also through the pool.
    fleet: two Ps behind the proxy's conductor, one of which is killed.
    pairs: a P and a D (vllm_pairs.py describes the notation), in fp32.
A single vLLM instance gives the expected answers.

Exits 0 if everything is as expected, 1 if not, 77 with "skipped: ..." and the reason if vLLM can't
run here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

from vllm_environment import ROOT, exit_status, install_connector
from vllm_fleet_check import check_fleet
from vllm_mixed_check import check_mixed
from vllm_multi_check import check_multi
from vllm_pair_check import LENGTHS, cases, cases_of, check_pairs
from vllm_pairs import ALL_PAIRS, FULL, MODELS, Pair, answers_alone
from vllm_pool_check import check_pool
from vllm_serving import prepare
from vllm_up_check import check_up

BESIDE_PAIRS = {
    "pool": check_pool,
    "multi": check_multi,
    "mixed": check_mixed,
    "fleet": check_fleet,
}
PARTS = ("unit", "up", *BESIDE_PAIRS, "pairs")


def main() -> int:
    """Run the requested parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--pairs",
        default=ALL_PAIRS,
        help="P:D/transport[/flow[/policy[/model]]], ...; default: all",
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds for vLLM")
    args = parser.parse_args()
    return exit_status(partial(find_problems, args))


def find_problems(args: argparse.Namespace) -> list[str]:
    """Run the requested parts; returns the problems.

    Raises:
        Skip: vLLM can't run here.
    """
    python, parts = prepare(), args.parts.split(",")
    install_connector(python)
    problems = run_tests(python) if "unit" in parts else []
    if "up" in parts:
        problems += check_up(python, args.start_timeout)
    if not {*parts} - {"unit", "up"}:
        return problems
    pairs = [Pair.parse(text) for text in args.pairs.split(",") if "pairs" in parts]
    wanted = answers_alone(python, args.start_timeout, cases())
    chosen = {f"{n} tokens": cases()[f"{n} tokens"] for n in LENGTHS if n > 128}
    for part, check in BESIDE_PAIRS.items():
        if part in parts:
            problems += check(python, chosen, wanted, args.start_timeout)
    for model in MODELS:
        if of_model := [pair for pair in pairs if pair.model == model]:
            if model != FULL:
                wanted = answers_alone(python, args.start_timeout, cases_of(model), model)
            problems += check_pairs(python, of_model, wanted, args.start_timeout)
    return problems


def run_tests(python: Path) -> list[str]:
    """Run the tests that need vLLM but no server, in its environment; returns the problems."""
    command = [python, "-m", "pytest", "-q", "--timeout=900", "tests/vllm"]
    # Warnings of third-party packages can't be fixed here.
    status = subprocess.run([*command, "-o", "filterwarnings=default"], cwd=ROOT, check=False)
    return ["tests/vllm failed"] if status.returncode else []


if __name__ == "__main__":
    sys.exit(main())
