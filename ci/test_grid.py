#!/usr/bin/env python3
"""Every pair of tensor-parallel sizes, for both connectors, head counts and block sizes.

Prints one table per setting, and exits 0 only if every pair said what a single instance says.
The whole grid starts some thousand processes: hours on a small machine. Options narrow it down.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

from support.pd import Pair  # noqa: E402  # the path is set above
from support.pd_grid import (  # noqa: E402
    PULL,
    SIZES,
    Setting,
    check_pair,
    expected_answers,
    side,
    write_grid_model,
)
from support.push import LAYERWISE  # noqa: E402

from mooncake_engine.config import Role  # noqa: E402
from mooncake_engine.errors import EngineError  # noqa: E402

PAIR_TIMEOUT_S = 180.0
CONNECTORS = {"pull": PULL, "push": LAYERWISE}
BLOCK_SIZES = {"16/16": (16, 16), "128/16": (128, 16)}
KV_HEADS = (24, 2)


def main() -> int:
    """Run the grid that was asked for; the exit status."""
    args = parse_args()
    settings = itertools.product(args.connector, args.kv_heads, args.blocks)
    num_failures = 0
    started = time.monotonic()
    for connector, kv_heads, blocks in settings:
        setting = Setting(CONNECTORS[connector], kv_heads, BLOCK_SIZES[blocks])
        print(f"\n{connector}, {kv_heads} kv heads, blocks {blocks} (down: P_tp, across: D_tp)")
        num_failures += asyncio.run(run_setting(setting, args.sizes))
    print(f"\n{num_failures} pairs failed, {time.monotonic() - started:.0f} s")
    return min(num_failures, 1)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="tensor-parallel sizes")
    add("--connector", nargs="+", choices=tuple(CONNECTORS), default=tuple(CONNECTORS))
    add("--kv-heads", type=int, nargs="+", default=KV_HEADS, help="fewer than ranks: replicas")
    add("--blocks", nargs="+", choices=tuple(BLOCK_SIZES), default=tuple(BLOCK_SIZES))
    return parser.parse_args()


async def run_setting(setting: Setting, sizes: list[int]) -> int:
    """One table; how many of its pairs failed."""
    failures = []
    print("      " + "".join(f"{size:>6}" for size in sizes), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model = write_grid_model(Path(directory) / "model", setting.kv_heads)
        expected = await expected_answers(model)
        for prefill_tp in sizes:
            print(f"{prefill_tp:>6}", end="", flush=True)
            for decode_tp in sizes:
                problem = await run_pair(model, setting, (prefill_tp, decode_tp), expected)
                print("    ok" if problem is None else "  FAIL", end="", flush=True)
                if problem is not None:
                    failures.append(f"P_tp {prefill_tp}, D_tp {decode_tp}: {problem}")
            print()
    print("\n".join(failures))
    return len(failures)


async def run_pair(
    model: Path, setting: Setting, sizes: tuple[int, int], expected: list[list[int]]
) -> str | None:
    """One pair; what was wrong with it."""
    try:
        async with (
            side(model, Role.PREFILL, setting, sizes[0]) as first,
            side(model, Role.DECODE, setting, sizes[1]) as second,
        ):
            checking = check_pair(Pair(first, second), setting, expected)
            await asyncio.wait_for(checking, PAIR_TIMEOUT_S)
    except (AssertionError, EngineError, asyncio.TimeoutError) as exc:
        return f"{type(exc).__name__}: {str(exc)[:300]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
