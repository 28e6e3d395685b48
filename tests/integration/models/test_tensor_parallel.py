"""Ranks as processes give the tokens of one rank, and a dead rank ends the instance with its
reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import LoadProgress
from mooncake_engine.errors import CheckpointError, ConfigError, EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, ExecutorOptions, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import Backend

SEEDED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, logprobs=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(
        "qwen2", num_attention_heads=12, num_key_value_heads=4, vocab_size=307, head_dim=None,
        hidden_size=96, tie_word_embeddings=True,
    )  # fmt: skip
    return write_checkpoint(model, tmp_path_factory.mktemp("qwen2"), max_shard="100KB")


def generate(executor: Executor) -> list[RunningRequest]:
    requests = [
        RunningRequest("short", (5, 9, 2)),
        RunningRequest("long", tuple(range(100, 190))),
        RunningRequest("seeded", tuple(range(30, 60)), SEEDED, seed=11),
    ]
    Stepper(executor, chunk=40).generate(requests)
    return requests


def check_until(executor: Executor, deadline: float) -> None:
    while time.monotonic() < deadline:
        executor.check()
        os.sched_yield()


@pytest.fixture(scope="module")
def expected(checkpoint: Path, backend: Backend) -> Iterator[list[list[int]]]:
    executor = InProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=32), backend), backend
    )
    yield [request.output for request in generate(executor)]
    executor.close()


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_rank_processes_give_tokens_of_one_rank(
    tp_size: int, checkpoint: Path, backend: Backend, expected: list[list[int]]
) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=32, tp_size=tp_size)
    progress: list[LoadProgress] = []
    executor = ProcessExecutor(
        make_plan(config, backend), ExecutorOptions(progress=progress.append)
    )
    try:
        executor.warm_up()
        assert [request.output for request in generate(executor)] == expected
        heads = [(r.shard.head_start, r.shard.head_stop) for r in executor.info.ranks]
        assert (heads[0][0], heads[-1][1]) == (0, 4)
        assert progress[-1].fraction == 1.0
    finally:
        executor.close()


def test_fused_linears_of_checkpoint_are_sharded_correctly(
    backend: Backend, tmp_path: Path
) -> None:
    config = EngineConfig(
        write_checkpoint(random_model("phi3", num_key_value_heads=4), tmp_path), num_kv_blocks=32
    )
    alone = InProcessExecutor(make_plan(config, backend), backend)
    expected = [request.output for request in generate(alone)]
    alone.close()
    executor = ProcessExecutor(make_plan(replace(config, tp_size=3), backend))
    try:
        assert [request.output for request in generate(executor)] == expected
    finally:
        executor.close()


def test_killed_rank_ends_instance_with_reason(checkpoint: Path, backend: Backend) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=32, tp_size=2)
    executor = ProcessExecutor(make_plan(config, backend))
    try:
        os.kill(executor.rank_pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDead, match="rank 1 of 2 died: killed by SIGKILL"):
            generate(executor)
        assert time.monotonic() - started < 5
        with pytest.raises(EngineDead, match="rank 1 of 2 died"):
            executor.check()
    finally:
        executor.close()


def test_rank_death_while_idle_is_detected(checkpoint: Path, backend: Backend) -> None:
    executor = ProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=32, tp_size=2), backend)
    )
    try:
        executor.check()
        os.kill(executor.rank_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match="rank 0 of 2 died: killed by SIGKILL"):
            check_until(executor, time.monotonic() + 5)
    finally:
        executor.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_ignore_signals_meant_for_their_parent(
    number: signal.Signals, checkpoint: Path, backend: Backend, expected: list[list[int]]
) -> None:
    executor = ProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=32, tp_size=2), backend)
    )
    try:
        for pid in executor.rank_pids:
            os.kill(pid, number)
        assert [request.output for request in generate(executor)] == expected
    finally:
        executor.close()


def test_ranks_end_when_their_parent_is_killed(checkpoint: Path) -> None:
    script = f"""
import pathlib, sys
from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_hal.registry import Registry
config = EngineConfig(pathlib.Path({str(checkpoint)!r}), num_kv_blocks=32, tp_size=2)
executor = ProcessExecutor(make_plan(config, Registry.discover().select_backend("cpu")))
print(*executor.rank_pids, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        os.sched_yield()
    assert len(pids) == 2
    assert alive == []


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_damaged_shard_raises_checkpoint_error_from_rank(
    checkpoint: Path, backend: Backend, tmp_path: Path
) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        ProcessExecutor(make_plan(EngineConfig(tmp_path, num_kv_blocks=32, tp_size=2), backend))


def test_more_ranks_than_heads_are_rejected_before_start(
    checkpoint: Path, backend: Backend
) -> None:
    with pytest.raises(ConfigError, match="use at most 12 ranks"):
        ProcessExecutor(make_plan(EngineConfig(checkpoint, num_kv_blocks=32, tp_size=16), backend))
