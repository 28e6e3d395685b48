#!/usr/bin/env python3
"""Tests mixed fleets: emulated GPUs, emulated NPUs and CPUs in one deployment, each as P and as D.

Every instance runs in separate processes. Prints one table per model and flow (rows: kinds of P and
D with tokens per block; columns: ranks of P and D), then a table of kills. Exits 0 only if every
answer equals the CPU's, no load failed, no more bytes than the KV were transferred, and all
resources were released. Options select a subset; --short tests one deployment behind a proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from support.emulated_devices import ALL_KINDS, KINDS  # noqa: E402  # the path is set above
from support.mixed_deployment import check_deployment  # noqa: E402
from support.mixed_fleet import (  # noqa: E402
    CONNECTORS,
    FAMILIES,
    Side,
    check_cell,
    left_in_shared_memory,
    make_cases,
    start_all,
    start_one,
    write_mixed_model,
)
from support.mixed_instances import (  # noqa: E402
    MOST_RANKS,
    InstancePool,
    Sides,
    in_sharing_order,
)
from support.mixed_kills import CONTEXT, check_kills  # noqa: E402
from support.mixed_wire import (  # noqa: E402
    LIMIT,
    bytes_by_kv,
    enter_own_network,
    other_network,
    start_apart,
    write_wide_model,
)
from support.npu import cpu  # noqa: E402
from support.pd_processes import Served  # noqa: E402

from mooncake_engine.errors import EngineError  # noqa: E402

RATIOS = ("2:3", "2:1", "1:1", "1:2", "4:2")
"""Ranks of P and D. Neighbours share a side, whose instance stays up."""
BLOCKS = ("128:16", "16:128")
GENERATION_PAIRS, SAME_BLOCKS = (("npu", "a3"), ("a3", "npu")), ("128:128",)
"""hccs does not connect NPUs of different generations; NPUs only support blocks of 128 tokens."""
CELL_TIMEOUT_S = 600.0
FAILURES = (AssertionError, EngineError, asyncio.TimeoutError, OSError, httpx.HTTPError)

Check = Callable[[int, Served, Served], Awaitable[str]]
"""Tests a cell, given its number; returns the table's entry."""


def main() -> int:
    """Run the requested tables; returns the exit status."""
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
            for family in args.family if args.kills != "only" else ():
                model = write_mixed_model(Path(folder), family)
                problems += asyncio.run(run_grid(args, family, model))
            if args.kills != "no":
                problems += asyncio.run(run_kills(args, Path(folder)))
            if args.kills == "yes" and subprocess.run([*own_command(), "--wire"]).returncode:
                problems.append("more bytes than the KV were transferred: see the last tables")
    # in a separate namespace this process can't see which files others have mapped
    left = set() if args.wire else left_in_shared_memory() - before
    problems += [f"left in /dev/shm: {name}" for name in sorted(left)]
    print("\n".join(["", *problems, f"{len(problems)} problems, {time.monotonic() - began:.0f} s"]))
    return min(len(problems), 1)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--short", action="store_true", help="three P, three D and a proxy, all pairs, one model")
    add("--wire", action="store_true", help="measure bytes on the wire only")
    add("--family", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    add("--how", nargs="+", choices=tuple(CONNECTORS), default=tuple(CONNECTORS))
    add("--pair", nargs="+", metavar="P:D", help=f"kinds: {', '.join(ALL_KINDS)}; default: all")
    add("--tp", nargs="+", metavar="P:D", choices=RATIOS, default=RATIOS)
    add("--kills", choices=("yes", "no", "only"), default="yes")
    add("--ranks", type=int, default=MOST_RANKS, help="concurrent ranks, of 0.4 GB each")
    return parser.parse_args()


def own_command() -> list[str]:
    """The command that started this program."""
    return [sys.executable, *sys.argv]


def sides_of(pairs: Sequence[str] | None) -> Iterator[Sides]:
    """All ordered pairs of different kinds, and of NPU generations, with block sizes that both
    support."""
    for p, d in (*itertools.permutations(KINDS, 2), *GENERATION_PAIRS):
        for blocks in BLOCKS if {p, d} <= {*KINDS} else SAME_BLOCKS:
            first, second = (int(size) for size in blocks.split(":"))
            is_taken = first in ALL_KINDS[p].block_sizes and second in ALL_KINDS[d].block_sizes
            if is_taken and (pairs is None or f"{p}:{d}" in pairs):
                yield Side(p, first), Side(d, second)


def cells_of(args: argparse.Namespace) -> list[Sides]:
    """The cells of a table, row by row: each pair of sides with each ratio of ranks."""
    return [
        (replace(prefill, tp_size=int(p)), replace(decode, tp_size=int(d)))
        for prefill, decode in in_sharing_order(list(sides_of(args.pair)))
        for p, d in (ratio.split(":") for ratio in RATIOS if ratio in args.tp)
    ]


async def run_table(cells: Sequence[Sides], pool: InstancePool, check: Check) -> list[str]:
    """Test every cell and print the table; returns the problems."""
    problems: list[str] = []
    ratios = list(dict.fromkeys(f"{p.tp_size}:{d.tp_size}" for p, d in cells))
    print(" " * 19 + "".join(f"{ratio:>8}" for ratio in ratios), end="", flush=True)
    for number, (prefill, decode) in enumerate(cells):
        if number % len(ratios) == 0:
            print(f"\n{prefill!s:>8} → {decode!s:<8}", end="")
        try:
            pair = await pool.serve(number)
            entry = await asyncio.wait_for(check(number, *pair), CELL_TIMEOUT_S)
        except FAILURES as exc:
            entry = "FAIL"
            ranks = f"{prefill.tp_size}:{decode.tp_size}"
            problems.append(f"{prefill} → {decode}, {ranks}: {describe(exc)}")
            pool.drop(number)
        print(f"{entry:>8}", end="", flush=True)
    print(flush=True)
    return problems


async def run_grid(args: argparse.Namespace, family: str, model: Path) -> list[str]:
    """Run the tables of one model; returns the problems."""
    problems: list[str] = []
    cells = cells_of(args)
    kinds = dict.fromkeys(side.kind for cell in cells for side in cell)
    with ExitStack() as stack:
        alone = [("decode", Side(kind, ALL_KINDS[kind].block_sizes[-1])) for kind in kinds]
        devices = start_all(stack, model, "pull", alone)
        async with cpu(model) as on_cpu:
            cases = await make_cases(on_cpu, devices)
    for how in args.how:

        async def check(number: int, prefill: Served, decode: Served, how: str = how) -> str:
            side = cells[number][1]
            await check_cell(model, how, (prefill, decode), side, cases, salt=f"cell {number}")
            return "ok"

        began = time.monotonic()
        print(f"\n{family}, {how}", flush=True)
        pool = InstancePool(partial(start_one, model, how), cells, args.ranks)
        with closing(pool):
            found = await run_table(cells, pool, check)
        problems += [f"{family}, {how}, {each}" for each in found]
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    return problems


async def run_kills(args: argparse.Namespace, folder: Path) -> list[str]:
    """Kill each side in each state, with one pair for any two kinds; returns the problems."""
    model = write_mixed_model(folder / "kills", "llama", max_position_embeddings=CONTEXT)
    async with cpu(model) as on_cpu:
        cases = await make_cases(on_cpu)
    pairs = {(p.kind, d.kind): (p, d) for p, d in sides_of(args.pair)}

    async def run_line(how: str, sides: Sides) -> list[str]:
        row, problems = f"{sides[0]!s:>8} → {sides[1]!s:<8} {how}", []
        async for name, problem in check_kills(model, how, sides, cases):
            verdict = "ok" if problem is None else f"FAIL {problem}"
            print(f"{row}  {name:<16}{verdict}", flush=True)
            if problem is not None:
                problems.append(f"{row.strip()}, killed: {name}: {problem}")
        return problems

    print("\nkilled", flush=True)
    found: list[str] = []
    for sides in pairs.values():  # both concurrently: they mostly wait
        lines = await asyncio.gather(*(run_line(how, sides) for how in args.how))
        found += itertools.chain.from_iterable(lines)
    return found


async def run_wire(args: argparse.Namespace, folder: Path) -> list[str]:
    """Measure the bytes on the wire relative to the KV's size; returns the problems."""
    model, problems, cells = write_wide_model(folder), [], cells_of(args)
    for how in args.how:

        async def check(number: int, prefill: Served, decode: Served, how: str = how) -> str:
            return f"{await bytes_by_kv(model, how, prefill, decode, f'cell {number}'):.4f}"

        print(f"\nbytes on the wire / bytes of KV, at most {LIMIT}: {how}", flush=True)
        with other_network() as through:
            start = partial(start_apart, model, how, through=through)
            with closing(InstancePool(start, cells, args.ranks)) as pool:
                found = await run_table(cells, pool, check)
        problems += [f"wire, {how}, {each}" for each in found]
    return problems


async def run_short(folder: Path) -> list[str]:
    """Test one deployment of all kinds; returns the problems."""
    try:
        for line in await check_deployment(write_mixed_model(folder, "llama")):
            print(line, flush=True)
    except FAILURES as exc:
        return [describe(exc)]
    return []


def describe(failure: BaseException) -> str:
    """A failure on one line."""
    return f"{type(failure).__name__}: {str(failure)[:300]}"


if __name__ == "__main__":
    sys.exit(main())
