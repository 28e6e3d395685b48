#!/usr/bin/env python3
"""Mixed fleets: emulated GPUs, emulated NPUs and CPUs in one deployment, each as P and as D.

Every instance is processes of its own. Prints one table per model and way of handing over (down:
from what to what, with tokens per block; across: ranks of P and D), then a table of kills, and
exits 0 only if every answer is the CPU's, no load failed, no more than the KV came across, and
everything was given back. Options narrow it down; --short is one deployment behind a proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from support.emulated_devices import KINDS  # noqa: E402  # the path is set above
from support.mixed_deployment import check_deployment  # noqa: E402
from support.mixed_fleet import (  # noqa: E402
    CONNECTORS,
    FAMILIES,
    Side,
    check_cell,
    left_in_shared_memory,
    make_cases,
    start_all,
    write_mixed_model,
)
from support.mixed_kills import KILLS, check_kill  # noqa: E402
from support.mixed_wire import (  # noqa: E402
    LIMIT,
    bytes_by_kv,
    enter_own_network,
    write_wide_model,
)
from support.npu import Case, cpu  # noqa: E402

from mooncake_engine.errors import EngineError  # noqa: E402

RATIOS = ("1:1", "2:1", "1:2", "4:2", "2:3")
BLOCKS = ("128:16", "16:128")
CELL_TIMEOUT_S = 600.0
FAILURES = (AssertionError, EngineError, asyncio.TimeoutError, OSError)

Sides = tuple[Side, Side]


def main() -> int:
    """Run what was asked for; the exit status."""
    args = parse_args()
    if args.wire:
        enter_own_network()
    began, before = time.monotonic(), left_in_shared_memory()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.wire:
            problems += asyncio.run(run_wire(args, Path(folder)))
        elif args.short:
            problems += asyncio.run(run_short(Path(folder)))
        else:
            for family in args.family:
                model = write_mixed_model(Path(folder), family)
                problems += asyncio.run(run_grid(args, family, model))
            if not args.no_kills:
                problems += asyncio.run(run_kills(args, Path(folder)))
    # in a namespace of its own it can't see what others have mapped
    left = set() if args.wire else left_in_shared_memory() - before
    problems += [f"left in /dev/shm: {name}" for name in sorted(left)]
    print("\n".join(["", *problems, f"{len(problems)} problems, {time.monotonic() - began:.0f} s"]))
    return min(len(problems), 1)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--short", action="store_true", help="three P, three D and a proxy, all pairs, one model")
    add("--wire", action="store_true", help="only what crosses, in a network of its own")
    add("--family", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    add("--how", nargs="+", choices=tuple(CONNECTORS), default=tuple(CONNECTORS))
    add("--pair", nargs="+", metavar="P:D", help=f"kinds, of {', '.join(KINDS)}; default: all")
    add("--tp", nargs="+", metavar="P:D", choices=RATIOS, default=RATIOS)
    add("--no-kills", action="store_true")
    return parser.parse_args()


def sides_of(pairs: Sequence[str] | None) -> Iterator[Sides]:
    """All ordered pairs of different kinds, with the block sizes that both take."""
    for p, d in itertools.permutations(KINDS, 2):
        for blocks in BLOCKS:
            first, second = (int(size) for size in blocks.split(":"))
            is_taken = first in KINDS[p].block_sizes and second in KINDS[d].block_sizes
            if is_taken and (pairs is None or f"{p}:{d}" in pairs):
                yield Side(p, first), Side(d, second)


async def run_grid(args: argparse.Namespace, family: str, model: Path) -> list[str]:
    """The tables of one model; what was wrong."""
    problems: list[str] = []
    async with cpu(model) as on_cpu:
        cases = await make_cases(on_cpu)
    for how in args.how:
        print(f"\n{family}, {how}" + "".join(f"{ratio:>8}" for ratio in args.tp), flush=True)
        for prefill, decode in sides_of(args.pair):
            print(f"{prefill!s:>8} → {decode!s:<8}", end="", flush=True)
            for ratio in args.tp:
                found = await run_cell(model, how, sized((prefill, decode), ratio), cases)
                print(f"{'ok' if found is None else 'FAIL':>8}", end="", flush=True)
                if found is not None:
                    problems.append(f"{family}, {how}, {prefill} → {decode}, {ratio}: {found}")
            print(flush=True)
    return problems


def sized(sides: Sides, ratio: str) -> Sides:
    """The sides with the ranks of a ratio such as ``2:1``."""
    first, second = (
        Side(side.kind, side.block_size, int(size))
        for side, size in zip(sides, ratio.split(":"), strict=True)
    )
    return first, second


async def run_cell(model: Path, how: str, sides: Sides, cases: Sequence[Case]) -> str | None:
    """One pair, started and ended; what was wrong with it."""
    try:
        with ExitStack() as stack:
            both = (("prefill", sides[0]), ("decode", sides[1]))
            prefill, decode = start_all(stack, model, how, both)
            wanted = check_cell(model, how, (prefill, sides[0], decode, sides[1]), cases)
            await asyncio.wait_for(wanted, CELL_TIMEOUT_S)
    except FAILURES as exc:
        return describe(exc)
    return None


async def run_kills(args: argparse.Namespace, folder: Path) -> list[str]:
    """Each side killed in each state; what was wrong."""
    model = write_mixed_model(folder / "kills", "llama")
    async with cpu(model) as on_cpu:
        cases = await make_cases(on_cpu)
    print("\nkilled" + " " * 13 + "".join(f"{how} {name:<24}" for how, name in KILLS), flush=True)
    problems: list[str] = []
    for sides in sides_of(args.pair):
        print(f"{sides[0]!s:>8} → {sides[1]!s:<8}", end="", flush=True)
        for how, name in KILLS:
            try:
                await asyncio.wait_for(check_kill(model, how, name, sides, cases), CELL_TIMEOUT_S)
            except FAILURES as exc:
                problems.append(f"{how}, {name}, {sides[0]} → {sides[1]}: {describe(exc)}")
                print(f"{'FAIL':<30}", end="", flush=True)
            else:
                print(f"{'ok':<30}", end="", flush=True)
        print(flush=True)
    return problems


async def run_wire(args: argparse.Namespace, folder: Path) -> list[str]:
    """What crosses, by the bytes of the KV; what was wrong."""
    model, problems = write_wide_model(folder), []
    print(f"bytes on the wire by bytes of KV, at most {LIMIT}", flush=True)
    for sides, how in itertools.product(list(sides_of(args.pair)), args.how):
        row = f"{sides[0]!s:>8} → {sides[1]!s:<8} {how}"
        try:
            found = await asyncio.wait_for(bytes_by_kv(model, how, sides), CELL_TIMEOUT_S)
            print(f"{row}  {found:.4f}", flush=True)
        except FAILURES as exc:
            problems.append(f"{row}: {describe(exc)}")
    return problems


async def run_short(folder: Path) -> list[str]:
    """One deployment of all kinds; what was wrong."""
    try:
        for line in await check_deployment(write_mixed_model(folder, "llama")):
            print(line, flush=True)
    except FAILURES as exc:
        return [describe(exc)]
    return []


def describe(failure: BaseException) -> str:
    """In one line."""
    return f"{type(failure).__name__}: {str(failure)[:300]}"


if __name__ == "__main__":
    sys.exit(main())
