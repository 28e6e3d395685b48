"""The worker extension interface, in one process and across processes."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stepping import GREEDY, RunningRequest, Stepper

from mooncake_engine.assembly import start_executors
from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, ExecutorOptions, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_hal.backend import Backend

Inbox = queue.Queue[tuple[int, bytes]]
EXTENSION = "support.recording_extension:make"


@pytest.fixture
def inbox() -> Inbox:
    return queue.Queue()


@pytest.fixture(params=[1, 2], ids=["InProcessExecutor", "ProcessExecutor"])
def executor(
    request: pytest.FixtureRequest, checkpoint: Path, backend: Backend, inbox: Inbox
) -> Iterator[Executor]:
    config = EngineConfig(checkpoint, num_kv_blocks=8, tp_size=request.param)
    options = ExecutorOptions(EXTENSION, lambda rank, message: inbox.put((rank, message)))
    executor = start_executors(make_plan(config, backend), backend, [options])[0]
    yield executor
    executor.close()


def test_messages_reach_every_rank_and_replies_return(executor: Executor, inbox: Inbox) -> None:
    ranks = len(executor.info.ranks)
    Stepper(executor).generate([RunningRequest("r", (1, 2, 3))])
    executor.send(b"report")
    answers = dict(inbox.get(timeout=10) for _ in range(ranks))
    layers = [0, 1, 2] * (GREEDY.max_tokens or 0)
    assert answers == {rank: repr((rank, ranks, 8, layers)).encode() for rank in range(ranks)}
    executor.send(b"report", rank=ranks - 1)
    assert inbox.get(timeout=10)[0] == ranks - 1
    executor.close()
    assert {inbox.get(timeout=10) for _ in range(ranks)} == {(r, b"closed") for r in range(ranks)}


def test_dead_extension_thread_ends_instance(executor: Executor) -> None:
    executor.send(b"die", rank=0)
    with pytest.raises(EngineDead, match="extension of rank 0 died: lost the fabric"):
        check_until(executor, time.monotonic() + 10)
    with pytest.raises(EngineDead, match="lost the fabric"):
        Stepper(executor).generate([RunningRequest("r", (1, 2, 3))])


def test_raising_extension_ends_instance(executor: Executor) -> None:
    executor.send(b"nonsense", rank=0)
    with pytest.raises(EngineDead, match="unknown message b'nonsense'"):
        check_until(executor, time.monotonic() + 10)


def test_raising_handler_ends_instance(checkpoint: Path, backend: Backend) -> None:
    def refuse(rank: int, message: bytes) -> None:
        raise RuntimeError(f"no room for {message!r} of rank {rank}")

    config = EngineConfig(checkpoint, num_kv_blocks=8)
    executor = ProcessExecutor(make_plan(config, backend), ExecutorOptions(EXTENSION, refuse))
    try:
        executor.send(b"report")
        with pytest.raises(EngineDead, match=r"messages on died: no room for .* of rank 0"):
            check_until(executor, time.monotonic() + 10)
    finally:
        executor.close()


def test_unknown_extension_is_rejected(checkpoint: Path, backend: Backend) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=8)
    for name in ("support.nothing:make", "support.recording_extension:absent", "nonsense"):
        with pytest.raises(ConfigError, match="can't be loaded"):
            InProcessExecutor(make_plan(config, backend), backend, ExecutorOptions(name))


def check_until(executor: Executor, deadline: float) -> None:
    while time.monotonic() < deadline:
        executor.check()
        time.sleep(0.01)
