"""Ranks on two nodes, which are processes of this host here: the tokens of one rank, and an exit
with its reason when a node is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import make_load, run_load
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, InProcessExecutor
from mooncake_engine.execution.node_launcher import NodeLauncher
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.node_config import NodeConfig
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends import free_port

END_S = 60


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> EngineConfig:
    secret = tmp_path / "secret"
    secret.write_text("of the nodes of this test")
    nodes = NodeConfig(nnodes=2, master_port=free_port(), secret="of the nodes of this test")
    return EngineConfig(checkpoint, num_kv_blocks=32, tp_size=2, threads=1, nodes=nodes)


@pytest.fixture
def other_node(config: EngineConfig, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the second node as an operator does; it waits for the first."""
    process = join(config, ["--tensor-parallel-size", "2"], tmp_path)
    yield process
    process.kill()
    process.wait(END_S)


def join(config: EngineConfig, sizes: list[str], folder: Path) -> subprocess.Popen[bytes]:
    words = ["serve", str(config.model), *sizes, "--threads", "1"]
    words += ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--headless"]
    words += ["--master-port", str(config.nodes.master_port)]
    words += ["--node-secret-file", str(folder / "secret")]
    return subprocess.Popen([sys.executable, "-m", "mooncake_engine", *words])


def answers(executor: Executor) -> list[list[int]]:
    requests = [RunningRequest("a", (5, 9, 2)), RunningRequest("b", tuple(range(100, 190)))]
    return Stepper(executor, chunk=40).generate(requests)


def test_two_nodes_give_tokens_of_one_rank_and_lost_node_is_named(
    config: EngineConfig, backend: Backend, other_node: subprocess.Popen[bytes]
) -> None:
    single = replace(config, tp_size=1, nodes=NodeConfig())
    alone = InProcessExecutor(make_plan(single, backend), backend)
    expected = answers(alone)
    alone.close()
    executor = ProcessExecutor(make_plan(config, backend), launcher=NodeLauncher(config))
    try:
        executor.warm_up()
        assert answers(executor) == expected
        other_node.kill()
        with pytest.raises(EngineDead, match=r"rank 1 of 2 died: node 1 \(127.0.0.1\) is gone"):
            _await_failure(executor)
    finally:
        executor.close()
    with pytest.raises(ProcessLookupError):  # the lost node's ranks exit by themselves
        _await_end(executor.rank_pids[1])


def test_data_parallel_ranks_of_two_nodes_share_experts(
    config: EngineConfig, tmp_path: Path
) -> None:
    model = write_checkpoint(random_model("qwen3_moe"), tmp_path / "model")
    load = make_load(SamplingParams(temperature=0.0, max_tokens=8), sizes=(1, 1, 1))
    expected = run_load(model, load, num_kv_blocks=32).answers
    sizes = {"dp_size": 2, "ep_size": 2, "nodes": config.nodes}
    words = ["--data-parallel-size", "2", "--ep-size", "2"]
    other = join(replace(config, model=model), words, tmp_path)
    try:
        assert run_load(model, load, num_kv_blocks=32, **sizes).answers == expected
    finally:
        other.kill()
        other.wait(END_S)


def _await_failure(executor: Executor) -> None:
    for _ in range(END_S * 10):
        executor.check()
        time.sleep(0.1)


def _await_end(pid: int) -> None:
    """Wait until the process has exited: raises ProcessLookupError."""
    for _ in range(END_S * 10):
        os.kill(pid, 0)
        time.sleep(0.1)
