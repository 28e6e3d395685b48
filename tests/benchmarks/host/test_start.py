"""Start time and memory of an instance, relative to importing torch alone.

The import is the part that every instance needs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.figures import Figure, record
from support.paced_instances import ready
from support.programs import TINY_LLAMA, descendants

ROUNDS = 3
IMPORT = "import torch, sys; print('ready', flush=True); sys.stdin.read()"
SERVE = ["mooncake_engine.cli", "serve", "--model", str(TINY_LLAMA), "--port", "0"]
SERVE += ["--backend", "cpu", "--num-kv-blocks", "256", "--threads", "1", "--swap-space", "0"]
PROCESSES = {
    "one process": (3.0, ["--no-core-process"]),
    "the core apart": (3.0, ["--core-process"]),
    "2 workers": (4.0, ["--core-process", "--api-workers", "2"]),
    "2 ranks": (3.5, ["--core-process", "--tp-size", "2"]),
}
"""Limits relative to importing torch; with API workers the start is of four processes on two
cores."""


def held_mib(pid: int) -> float:
    """MiB of a process and its descendants; shared memory counts once."""
    pages = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in (pid, *descendants(pid))]
    return sum(int(text.split("\nPss:")[1].split()[0]) for text in pages) / 1024


def started(argv: list[str]) -> tuple[float, float]:
    """Seconds until an instance is ready, and its MiB."""
    begin = time.perf_counter()
    with ready(argv, {}) as (_, program):
        return time.perf_counter() - begin, held_mib(program.process.pid)


def imported() -> tuple[float, float]:
    """The same for a process that only imports torch."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", IMPORT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        return time.perf_counter() - begin, held_mib(child.pid)


@pytest.mark.parametrize("name", PROCESSES)
def test_instance_start_time_and_memory(name: str, benchmark: Any) -> None:
    wanted, options = PROCESSES[name]
    turns = [(started([*SERVE, *options]), imported()) for _ in range(ROUNDS)]
    benchmark.pedantic(imported, rounds=1)
    elapsed = median(ours[0] / alone[0] for ours, alone in turns)
    shown = f"{min(ours[0] for ours, _ in turns):.1f} s"
    figure = Figure(f"host: start, {name}", elapsed, wanted, "times", at_least=False, context=shown)
    record(benchmark, figure)
    held, alone_mib = (median(each[side][1] for each in turns) for side in (0, 1))
    shown = f"{held:.0f} MiB, torch {alone_mib:.0f}"
    name = f"host: memory when ready, {name}"
    ratio = held / alone_mib
    record(benchmark, Figure(name, ratio, 3.0, "times", at_least=False, context=shown))
