"""Ranks of one or two pipeline stages as actors of a Ray cluster with two nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import make_load, run_load
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig, ExecutorKind
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.execution.ray_launcher import RayLauncher
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import Backend

# Ray leaves sockets and log files open until the interpreter exits.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes with one CPU each, so that no node holds two ranks."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def cluster(nodes: Cluster) -> str:
    """The cluster's address."""
    address: str = nodes.address
    return address


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
def test_ranks_on_two_nodes_give_tokens_of_one_rank(
    executor: ProcessExecutor, checkpoint: Path, backend: Backend
) -> None:
    alone = InProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=32), backend), backend
    )
    expected = answers(alone)
    alone.close()
    executor.warm_up()
    assert answers(executor) == expected


def test_signal_to_ranks_too_lets_answers_complete(executor: ProcessExecutor) -> None:
    """Only the executor stops ranks: a service manager signals every process."""
    executor.warm_up()
    expected = answers(executor)
    for pid in executor.rank_pids:
        os.kill(pid, signal.SIGTERM)
    assert answers(executor) == expected


def test_killed_rank_ends_instance_with_reason(executor: ProcessExecutor) -> None:
    os.kill(executor.rank_pids[1], signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1 of 2 died"):
        answers(executor)


def test_data_parallel_ranks_on_two_nodes_share_experts(cluster: str, tmp_path: Path) -> None:
    model = write_checkpoint(random_model("qwen3_moe"), tmp_path)
    load = make_load(SamplingParams(temperature=0.0, max_tokens=8), sizes=(1, 1, 1))
    expected = run_load(model, load, num_kv_blocks=32).answers
    found = run_load(
        model,
        load,
        num_kv_blocks=32,
        dp_size=2,
        ep_size=2,
        ep_dispatch_min_tokens=20,
        executor=ExecutorKind.RAY,
        ray_address=cluster,
    )
    assert found.answers == expected


def test_ranks_of_one_data_parallel_rank_share_a_node(
    nodes: Cluster, cluster: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_engine.execution.ray_launcher._PLACE_TIMEOUT_S", 5.0)
    config = EngineConfig(
        checkpoint,
        num_kv_blocks=32,
        dp_size=2,
        tp_size=2,
        executor=ExecutorKind.RAY,
        ray_address=cluster,
        threads=1,
    )
    larger = [nodes.add_node(num_cpus=2)]
    try:
        launcher = RayLauncher(config)
        with pytest.raises(ConfigError, match=r"for 4 ranks .* 2 of them on one host"):
            launcher.start()
        larger.append(nodes.add_node(num_cpus=2))
        assert launcher._placement_group.wait(60)
        placed = ray.util.placement_group_table(launcher._placement_group)
        assert [bundle["CPU"] for bundle in placed["bundles"].values()] == [2.0, 2.0]
        assert len(set(placed["bundles_to_node_id"].values())) == 2
        launcher.close()
    finally:
        for node in larger:
            nodes.remove_node(node)


def test_cluster_without_free_resources_reports_error(
    cluster: str, checkpoint: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_engine.execution.ray_launcher._PLACE_TIMEOUT_S", 0.5)
    config = EngineConfig(checkpoint, num_kv_blocks=32, tp_size=3, ray_address=cluster, threads=1)
    with pytest.raises(ConfigError, match="lacks resources for 3 ranks"):
        ProcessExecutor(make_plan(config, backend), launcher=RayLauncher(config))
