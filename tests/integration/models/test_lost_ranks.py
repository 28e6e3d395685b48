"""Ranks divided both by tensor and by data parallelism: a lost one ends all four with its reason, a
slow one only delays the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import make_load, serve_all

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import AddRequest
from mooncake_engine.data_parallel_core import DataParallelCore
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.step_watchdog import StepWatch, StepWatchdog

LOAD = make_load(SamplingParams(temperature=0.0, max_tokens=40), sizes=(1, 1, 1))


class Divided(NamedTuple):
    """Two data-parallel ranks of two tensor-parallel ranks each, each with two of eight experts."""

    core: DataParallelCore
    executors: tuple[ProcessExecutor, ...]

    @property
    def pids(self) -> list[int]:
        return [pid for executor in self.executors for pid in executor.rank_pids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("qwen3_moe"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def divided(model: Path) -> Iterator[Divided]:
    config = EngineConfig(
        model,
        num_kv_blocks=32,
        max_num_batched_tokens=40,
        dp_size=2,
        tp_size=2,
        ep_size=4,
        ep_dispatch_min_tokens=20,
        threads=1,
        dtype="float32",
        swap_space_bytes=4 << 20,
    )
    watch = StepWatch(4.0)
    core = build_engine(config, watch=watch).core
    assert isinstance(core, DataParallelCore)
    watchdog = StepWatchdog(watch, core.abandon_step)
    executors = []
    for each in core._cores:
        assert isinstance(each._executor, ProcessExecutor)
        executors.append(each._executor)
    yield Divided(core, tuple(executors))
    watchdog.close()
    core.close()


def run_on(core: DataParallelCore) -> NoReturn:
    while True:
        core.step()


@pytest.mark.parametrize(
    ("rank", "sent", "reason"),
    [
        (1, signal.SIGKILL, "rank 1 of 4 died: killed by SIGKILL"),
        (2, signal.SIGKILL, "rank 2 of 4 died: killed by SIGKILL"),
        (3, signal.SIGSTOP, r"did not return within 4 s .* rank 3 is stopped \(SIGSTOP"),
    ],
)
def test_lost_rank_ends_instance_with_reason(
    rank: int, sent: signal.Signals, reason: str, divided: Divided
) -> None:
    """Whether the rank serves the request itself or only has experts for it."""
    divided.core.post(AddRequest(LOAD[0]))
    divided.core.step()
    os.kill(divided.pids[rank], sent)
    with pytest.raises(EngineDead, match=reason):
        run_on(divided.core)
    for executor in divided.executors:  # the error of requests of either data-parallel rank
        with pytest.raises(EngineDead, match=reason):
            executor.check()
    divided.core.close()
    for pid in divided.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_slow_rank_only_delays_the_others(divided: Divided) -> None:
    expected = serve_all(divided.core, LOAD).answers
    assert divided.core.reset_prefix_cache()
    os.kill(divided.pids[3], signal.SIGSTOP)
    waking = threading.Timer(1.0, os.kill, (divided.pids[3], signal.SIGCONT))
    waking.start()
    started = time.monotonic()
    assert serve_all(divided.core, LOAD).answers == expected
    assert time.monotonic() - started > 0.9
    waking.join()
