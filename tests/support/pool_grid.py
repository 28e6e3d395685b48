"""Instances on devices of any kind, with ranks and stages, that share one node store."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.emulated_devices import KINDS
from support.mixed_fleet import DEADLINE_S, START_S, TOKENS_IN_POOL, completer, tokens_of
from support.npu import FEW, Case, clear_continuation
from support.pd import Instance
from support.pd_grid import read_size
from support.pd_processes import Served, body_of
from support.programs import Program
from support.store_process import StoreProcess

CHUNK = 128
"""A multiple of the block size of every kind of device."""
LENGTH = 300
SAVED_S = 60.0

_firsts = itertools.count(3)


@dataclass(frozen=True)
class PoolSide:
    """One instance; as text, ``cuda/16:2x1``: kind, tokens per block, stages, ranks per stage.

    Args:
        kind: of KINDS.
        block_size: tokens per block.
        tp_size, pp_size: ranks of each stage, and stages.
    """

    kind: str
    block_size: int
    tp_size: int = 1
    pp_size: int = 1

    @classmethod
    def parse(cls, text: str) -> PoolSide:
        """Parse the text form; stages, ranks and block size may be left out."""
        where, _, sizes = text.partition(":")
        kind, _, block_size = where.partition("/")
        if kind not in KINDS:
            raise ValueError(f"wanted one of {', '.join(KINDS)} in {text!r}")
        size = int(block_size or KINDS[kind].block_sizes[0])
        return cls(kind, size, **read_size(sizes or "1"))

    def __str__(self) -> str:
        stages = f"{self.pp_size}x" if self.pp_size > 1 else ""
        return f"{self.kind}/{self.block_size}:{stages}{self.tp_size}"


def start_sides(
    stack: ExitStack, model: Path, sides: Sequence[PoolSide], store: StoreProcess
) -> list[Served]:
    """Start an instance of each side concurrently; the stack stops them."""
    pool = f"connect=127.0.0.1:{store.port},chunk={CHUNK},load=always"
    programs = []
    for side in sides:
        kind = KINDS[side.kind]
        argv = ["mooncake_engine.cli", "serve", "--model", str(model), "--port", "0"]
        argv += ["--threads", "1", "--num-kv-blocks", str(TOKENS_IN_POOL // side.block_size)]
        argv += [*kind.serve_options(side.block_size, side.tp_size)]
        argv += ["--pp-size", str(side.pp_size)] if side.pp_size > 1 else []
        argv += ["--kv-pool", pool, "--kv-secret-file", str(store.secret_file)]
        program = Program(argv, environment=kind.environment)
        stack.callback(program.close)
        programs.append(program)
    return [Served(each.wait_for("ready ", START_S).split()[1], each) for each in programs]


async def make_case(on_cpu: Instance, pair: Sequence[Served]) -> Case:
    """A prompt with a unique prefix, and the answer on which the CPU and each of the pair alone
    agree: in a mixture of experts, rounding decides near ties."""
    first = next(_firsts)
    alone = [completer(served, f"{first}-{number}") for number, served in enumerate(pair)]
    case = await clear_continuation(on_cpu, (first,), LENGTH, alone)
    for served in pair:
        await _await_saves(served)
    return case


async def check_pair(writer: Served, reader: Served, case: Case) -> None:
    """Check that an instance loads the KV that another one saved, and answers as the CPU does.

    Raises:
        AssertionError: a check failed.
    """
    saved = await _figure(writer, "num_saved_chunks")
    await _ask(writer, case, "the writer")
    await _await_saves(writer, saved + LENGTH // CHUNK)
    loaded = await _figure(reader, "num_loaded_chunks")
    await _ask(reader, case, "the reader")
    assert await _figure(reader, "num_loaded_chunks") == loaded + LENGTH // CHUNK, "not loaded"
    assert await _figure(reader, "num_failed_loads") == 0, "a load failed"
    for served in (writer, reader):
        await served.wait_until_idle(SAVED_S)


async def _ask(served: Served, case: Case, who: str) -> None:
    answer = await asyncio.wait_for(served.complete(body_of(case.prompt, FEW)), DEADLINE_S)
    found = tokens_of(answer)
    assert found == case.tokens, f"wrong tokens of {who}: {found}, wanted {case.tokens}"


async def _await_saves(served: Served, num_saved_chunks: float = 0) -> None:
    """Wait until no save is in flight and that many chunks have been saved in all."""
    deadline = time.monotonic() + SAVED_S
    while (
        await _figure(served, "saves_in_flight")
        or await _figure(served, "num_saved_chunks") < num_saved_chunks
    ):
        assert time.monotonic() < deadline, "its chunks were not saved in time"
        await asyncio.sleep(0.05)


async def _figure(served: Served, name: str) -> float:
    return await served.figure(f"mooncake:kv_pool_{name}")
