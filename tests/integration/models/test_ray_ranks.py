"""Ranks, of one stage or of two, as actors of a Ray cluster with two nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig, ExecutorKind
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.execution.ray_launcher import RayLauncher
from mooncake_hal.backend import Backend

# Ray leaves sockets and log files to the interpreter's end.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster of two nodes with one CPU each: no node holds two ranks."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(params=["tp_size"])
def executor(
    request: pytest.FixtureRequest, cluster: str, checkpoint: Path, backend: Backend
) -> Iterator[ProcessExecutor]:
    config = EngineConfig(
        checkpoint,
        num_kv_blocks=32,
        **{request.param: 2},
        executor=ExecutorKind.RAY,
        ray_address=cluster,
        threads=1,
    )
    executor = ProcessExecutor(make_plan(config, backend), launcher=RayLauncher(config))
    yield executor
    executor.close()


def answers(executor: Executor) -> list[list[int]]:
    requests = [RunningRequest("a", (5, 9, 2)), RunningRequest("b", tuple(range(100, 190)))]
    return Stepper(executor, chunk=40).generate(requests)


@pytest.mark.parametrize("executor", ["tp_size", "pp_size"], indirect=True)
def test_ranks_on_two_nodes_choose_the_tokens_of_one_rank(
    executor: ProcessExecutor, checkpoint: Path, backend: Backend
) -> None:
    alone = InProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=32), backend), backend
    )
    expected = answers(alone)
    alone.close()
    executor.warm_up()
    assert answers(executor) == expected


def test_a_stop_that_reaches_the_ranks_too_lets_answers_end(executor: ProcessExecutor) -> None:
    """When a rank ends is the executor's decision: a service manager signals every process."""
    executor.warm_up()
    expected = answers(executor)
    for pid in executor.rank_pids:
        os.kill(pid, signal.SIGTERM)
    assert answers(executor) == expected


def test_a_killed_rank_ends_the_instance_with_its_reason(executor: ProcessExecutor) -> None:
    os.kill(executor.rank_pids[1], signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1 of 2 died"):
        answers(executor)


def test_a_cluster_without_room_says_so(
    cluster: str, checkpoint: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_engine.execution.ray_launcher._PLACE_TIMEOUT_S", 0.5)
    config = EngineConfig(checkpoint, num_kv_blocks=32, tp_size=3, ray_address=cluster, threads=1)
    with pytest.raises(ConfigError, match="no room for 3 ranks"):
        ProcessExecutor(make_plan(config, backend), launcher=RayLauncher(config))
