#!/usr/bin/env python3
"""Tests the KVCache pool between instances of every shape: each loads what any other one saved.

All instances of one model share one store process. Prints a table per model (rows: writers,
columns: readers), and exits 0 only if every pair gives a CPU's answers, and the reader loaded what
the writer saved. Options select a subset.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from support.mixed_fleet import FAMILIES, write_mixed_model  # noqa: E402  # the path is set above
from support.npu import cpu  # noqa: E402
from support.pd import Instance  # noqa: E402
from support.pd_processes import Served  # noqa: E402
from support.pool_grid import PoolSide, check_pair, make_case, start_sides  # noqa: E402
from support.store_process import StoreProcess  # noqa: E402

from mooncake_engine.errors import EngineError  # noqa: E402

SIDES = ("cpu", "cpu/128:2", "cpu:2x1", "cuda", "cuda/128:2", "npu", "npu:2")
OVERRIDES = {"moe": {"num_experts_per_tok": 6}, "mla": {"first_k_dense_replace": 2}}
"""Overrides that avoid expert selection: all six experts, or only dense layers. Otherwise a
writer's rounding could select another expert, and a reader of another kind would continue from its
KV."""
PAIR_TIMEOUT_S = 300.0
FAILURES = (AssertionError, EngineError, asyncio.TimeoutError, OSError)


def main() -> int:
    """Run the requested tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument(
        "--sides",
        nargs="+",
        type=PoolSide.parse,
        default=[PoolSide.parse(text) for text in SIDES],
        metavar="KIND/BLOCK:RANKS",
        help=f"instances; default: {' '.join(SIDES)}",
    )
    args = parser.parse_args()
    os.chdir(ROOT)
    began = time.monotonic()
    problems: list[str] = []
    for family in args.family:
        with tempfile.TemporaryDirectory() as folder:
            problems += asyncio.run(run_grid(family, args.sides, Path(folder)))
    for problem in problems:
        print(problem)
    print(f"{time.monotonic() - began:.0f} s; {len(problems)} problems")
    return min(len(problems), 1)


async def run_grid(family: str, sides: Sequence[PoolSide], folder: Path) -> list[str]:
    """Run and print the table of one model; returns the problems."""
    model, problems = write_mixed_model(folder, family, **OVERRIDES.get(family, {})), []
    with ExitStack() as stack:
        store = StoreProcess(folder, "--dram", "256M")
        stack.callback(store.end)
        instances = start_sides(stack, model, sides, store)
        print(f"\n{family:<14}" + "".join(f"{side!s:>14}" for side in sides), flush=True)
        async with cpu(model) as on_cpu:
            for row, writer in zip(sides, instances, strict=True):
                print(f"{row!s:<14}", end="", flush=True)
                for column, reader in zip(sides, instances, strict=True):
                    found = None if row == column else await run_pair(on_cpu, writer, reader)
                    if found is not None:
                        problems.append(f"{family}, {row} to {column}: {found}")
                    word = "-" if row == column else "ok" if found is None else "FAIL"
                    print(f"{word:>14}", end="", flush=True)
                print(flush=True)
    return problems


async def run_pair(on_cpu: Instance, writer: Served, reader: Served) -> str | None:
    """Test one pair with a new prompt; returns the problem, None if there is none."""
    try:
        case = await make_case(on_cpu, (writer, reader))
        await asyncio.wait_for(check_pair(writer, reader, case), PAIR_TIMEOUT_S)
    except FAILURES as exc:
        return f"{type(exc).__name__}: {str(exc)[:300]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
