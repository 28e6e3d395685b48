#!/usr/bin/env python3
"""Tests every pair of sizes with both connectors, all models and block sizes.

A size is a number of tensor-parallel ranks, such as 3, or a number of stages and the ranks of each,
such as 2x3; 4e2 is four ranks with experts in two parts.

Prints one table per setting, and exits 0 only if every pair gives the answers of a single instance.
Ranks are real processes. The decode instances of one model and connector stay up; each prefill
instance is started once and serves all of them concurrently, with different prompts for each pair.
Options select a subset.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

from support.pd import Instance, Pair, instance  # noqa: E402  # the path is set above
from support.pd_grid import (  # noqa: E402
    EXPERT_MODELS,
    EXPERT_SIZES,
    MODELS,
    PIPELINES,
    PULL,
    SIZES,
    Question,
    check_pair,
    make_questions,
    read_size,
    side,
    write_grid_model,
)
from support.push import LAYERWISE  # noqa: E402

from mooncake_engine.config import Role  # noqa: E402
from mooncake_engine.errors import EngineError  # noqa: E402

LOG = ROOT / ".cache" / "test-grid.log"
PAIR_TIMEOUT_S = 300.0
CONNECTORS = {"pull": PULL, "push": LAYERWISE}
BLOCK_SIZES = {"16/16": (16, 16), "128/16": (128, 16)}
PLAIN_GRID = {
    "prefill": (*SIZES, *PIPELINES),
    "decode": SIZES,
    "model": tuple(name for name in MODELS if name not in EXPERT_MODELS),
    "blocks": tuple(BLOCK_SIZES),
}
EXPERT_GRID = {
    "prefill": EXPERT_SIZES,
    "decode": EXPERT_SIZES,
    "model": EXPERT_MODELS,
    "blocks": ("16/16",),
}
"""What is tested by default."""
FAILURES = (AssertionError, EngineError, asyncio.TimeoutError)


@dataclass(frozen=True)
class Grid:
    """All pairs of one model and connector.

    Args:
        model: directory of the model.
        connector: name of the connector.
        prefill_sizes, decode_sizes: stages and ranks of the instances.
        blocks: names from BLOCK_SIZES.
        questions: prompts by block size name, prefill size and decode size.
    """

    model: Path
    connector: str
    prefill_sizes: Sequence[str]
    decode_sizes: Sequence[str]
    blocks: Sequence[str]
    questions: dict[tuple[str, str, str], list[Question]]


def main() -> int:
    """Run the requested grid; returns the exit status."""
    args = parse_args()
    keep_logs_apart()
    started = time.monotonic()
    num_pairs = num_failures = 0
    for name in args.model:
        pairs, failures = asyncio.run(run_model(name, args))
        num_pairs += pairs
        num_failures += failures
    seconds = time.monotonic() - started
    print(f"\n{num_pairs} pairs, {num_failures} failed, {seconds:.0f} s", flush=True)
    return min(num_failures, 1)


def keep_logs_apart() -> None:
    """Redirect standard error to a file: dozens of instances would log into the table."""
    LOG.parent.mkdir(exist_ok=True)
    print(f"instances log to {LOG.relative_to(ROOT)}", flush=True)
    with LOG.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--experts", action="store_true", help="models with experts, sharded unlike on P and D")
    add("--prefill", type=checked_size, nargs="+", help="sizes")
    add("--decode", type=checked_size, nargs="+", help="sizes")
    add("--connector", nargs="+", choices=tuple(CONNECTORS), default=tuple(CONNECTORS))
    add("--model", nargs="+", choices=tuple(MODELS))
    add("--blocks", nargs="+", choices=tuple(BLOCK_SIZES))
    args = parser.parse_args()
    for name, default in (EXPERT_GRID if args.experts else PLAIN_GRID).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def checked_size(name: str) -> str:
    """Check a size option; argparse turns a ValueError into a message."""
    read_size(name)
    return name


async def run_model(name: str, args: argparse.Namespace) -> tuple[int, int]:
    """Run all tables of one model; returns the numbers of pairs and of failures."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_grid_model(Path(directory) / "model", name)
        keys = list(itertools.product(args.blocks, args.prefill, args.decode))
        async with instance(model, num_kv_blocks=512) as single:
            questions = {key: await make_questions(single, seed) for seed, key in enumerate(keys)}
        failures = 0
        for connector in args.connector:
            print(f"\n{name}, {connector} (rows: blocks and P, columns: D)", flush=True)
            sizes = (args.prefill, args.decode, args.blocks)
            failures += await run_grid(Grid(model, CONNECTORS[connector], *sizes, questions))
        return len(keys) * len(args.connector), failures


async def run_grid(grid: Grid) -> int:
    """Run and print one table; returns the number of failed pairs."""
    print(" " * 14 + "".join(f"{size:>6}" for size in grid.decode_sizes), flush=True)
    problems: list[str] = []
    async with decoders(grid) as running:
        for blocks, prefill_size in itertools.product(grid.blocks, grid.prefill_sizes):
            started = time.monotonic()
            row = await run_row(grid, blocks, prefill_size, running)
            cells = "".join("    ok" if problem is None else "  FAIL" for problem in row)
            seconds = time.monotonic() - started
            print(f"{blocks:>8}{prefill_size:>6}{cells}  {seconds:.0f} s", flush=True)
            problems += [
                f"blocks {blocks}, P {prefill_size}, D {size}: {problem}"
                for size, problem in zip(grid.decode_sizes, row, strict=True)
                if problem is not None
            ]
    print("\n".join(problems), end="\n" if problems else "", flush=True)
    return len(problems)


@asynccontextmanager
async def decoders(grid: Grid) -> AsyncIterator[dict[str, Instance]]:
    """A decode instance of each size, stopped when the block ends."""
    [block_size] = {BLOCK_SIZES[blocks][1] for blocks in grid.blocks}
    async with AsyncExitStack() as stack:
        running = {}
        for size in grid.decode_sizes:
            context = side(
                grid.model, Role.DECODE, grid.connector, size=size, block_size=block_size
            )
            running[size] = await stack.enter_async_context(context)
        yield running


async def run_row(
    grid: Grid, blocks: str, prefill_size: str, running: dict[str, Instance]
) -> list[str | None]:
    """Test one prefill instance with all decode instances at once; returns each pair's problem."""
    block_size = BLOCK_SIZES[blocks][0]
    try:
        async with side(
            grid.model, Role.PREFILL, grid.connector, size=prefill_size, block_size=block_size
        ) as prefill:
            row = await asyncio.gather(
                *(
                    run_pair(Pair(prefill, decode), grid.questions[blocks, prefill_size, size])
                    for size, decode in running.items()
                )
            )
            await prefill.check_clean(30.0)
    except FAILURES as exc:
        return [describe(exc)] * len(running)
    return row


async def run_pair(both: Pair, questions: Sequence[Question]) -> str | None:
    """Test one pair; returns the problem, None if there is none."""
    try:
        await asyncio.wait_for(check_pair(both, questions), PAIR_TIMEOUT_S)
    except FAILURES as exc:
        return describe(exc)
    return None


def describe(failure: BaseException) -> str:
    """A failure on one line."""
    return f"{type(failure).__name__}: {str(failure)[:300]}"


if __name__ == "__main__":
    sys.exit(main())
