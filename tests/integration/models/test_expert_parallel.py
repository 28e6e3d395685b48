"""Expert parallelism: the tokens of one rank, the bytes transferred, and failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import make_load, run_load
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.messages import ExpertLoad
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import Backend

EVERY_STEP, PROMPTS, NO_STEP = 1, 20, 10_000
"""Minimum tokens of a step that uses dispatch; with 1, decodes use it too, so that some ranks have
no tokens."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_checkpoint(random_model(family), tmp_path_factory.mktemp(family))
        for family in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
    }


def requests() -> list[RunningRequest]:
    prompts = {"short": (5, 9, 2), "long": tuple(range(100, 190)), "other": tuple(range(20, 45))}
    return [RunningRequest(name, prompt) for name, prompt in prompts.items()]


def answers(executor: Executor) -> list[list[int]]:
    try:
        executor.warm_up()
        return Stepper(executor, chunk=40).generate(requests())
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("family", "tp_size", "ep_size", "least"),
    [
        ("qwen3_moe", 2, 2, EVERY_STEP),
        ("deepseek_v3", 4, 2, PROMPTS),
        *(
            pytest.param(family, *sizes, marks=pytest.mark.slow)
            for family in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
            for sizes in ((2, 2, NO_STEP), (4, 4, EVERY_STEP), (4, 2, EVERY_STEP))
        ),
    ],
)
def test_ranks_give_tokens_of_one_rank(
    family: str,
    tp_size: int,
    ep_size: int,
    least: int,
    checkpoints: dict[str, Path],
    backend: Backend,
) -> None:
    """The unit tests compare logits, division by division."""
    alone = EngineConfig(checkpoints[family], num_kv_blocks=32)
    expected = answers(InProcessExecutor(make_plan(alone, backend), backend))
    config = replace(alone, tp_size=tp_size, ep_size=ep_size, ep_dispatch_min_tokens=least)
    assert answers(ProcessExecutor(make_plan(config, backend))) == expected


@pytest.mark.parametrize("dp_size", [1, 2])
def test_captured_graphs_exclude_experts_and_change_no_tokens(
    dp_size: int, checkpoints: dict[str, Path]
) -> None:
    load = make_load(SamplingParams(temperature=0.0, max_tokens=12), sizes=(1, 1, 1))
    options: dict[str, Any] = {"num_kv_blocks": 32, "max_num_batched_tokens": 40}
    expected = run_load(checkpoints["deepseek_v3"], load, **options).answers
    found = run_load(
        checkpoints["deepseek_v3"],
        load,
        tp_size=2,
        dp_size=dp_size,
        ep_size=2,
        ep_dispatch_min_tokens=PROMPTS,
        piecewise_graph_max_tokens=32,
        **options,
    )
    assert found.answers == expected


def test_load_is_reported_and_replicas_change_no_tokens(
    checkpoints: dict[str, Path], backend: Backend, tmp_path: Path
) -> None:
    loads = {layer: (1, 50, 1, 1, 40, 1, 1, 1) for layer in range(3)}
    load = tmp_path / "load.json"
    load.write_bytes(msgspec.json.encode(ExpertLoad(loads, 2.0, 0)))
    alone = EngineConfig(checkpoints["qwen3_moe"], num_kv_blocks=32)
    expected = answers(InProcessExecutor(make_plan(alone, backend), backend))
    config = replace(
        alone,
        tp_size=2,
        ep_size=2,
        redundant_experts=2,
        expert_load=load,
        ep_dispatch_min_tokens=PROMPTS,
    )
    executor = ProcessExecutor(make_plan(config, backend))
    assert answers(executor) == expected
    seen = executor.expert_load
    assert seen is not None
    assert set(seen.tokens) == {0, 1, 2}
    assert seen.num_tokens % (3 * 3) == 0  # layers, choices
    assert seen.num_tokens > 0
    assert 1.0 <= seen.imbalance <= 2.0


def test_stages_divide_their_experts_over_their_own_ranks(
    checkpoints: dict[str, Path], backend: Backend
) -> None:
    alone = EngineConfig(checkpoints["mixtral"], num_kv_blocks=32)
    expected = answers(InProcessExecutor(make_plan(alone, backend), backend))
    config = replace(alone, pp_size=2, tp_size=2, ep_size=2, ep_dispatch_min_tokens=PROMPTS)
    assert answers(ProcessExecutor(make_plan(config, backend))) == expected


def test_each_stage_rebalances_its_own_experts_and_changes_no_tokens(
    checkpoints: dict[str, Path], backend: Backend
) -> None:
    alone = EngineConfig(checkpoints["qwen3_moe"], num_kv_blocks=32)
    expected = answers(InProcessExecutor(make_plan(alone, backend), backend))
    config = replace(
        alone,
        pp_size=2,
        tp_size=2,
        ep_size=2,
        redundant_experts=2,
        eplb_step_interval=3,
        ep_dispatch_min_tokens=PROMPTS,
    )
    executor = ProcessExecutor(make_plan(config, backend))
    try:
        stepper = Stepper(executor, chunk=40)
        deadline = time.monotonic() + 60
        while not all(has_moved(load) for load in executor._expert_loads[::2]):
            assert time.monotonic() < deadline, executor.expert_load
            assert stepper.generate(requests()) == expected
        assert stepper.generate(requests()) == expected
        load = executor.expert_load
        assert load is not None
        assert list(load.tokens) == [0, 1, 2]
    finally:
        executor.close()


def has_moved(load: ExpertLoad | None) -> bool:
    return load is not None and load.num_placements > 0 and load.num_moved > 0


def test_rank_killed_in_all_to_all_ends_instance_with_reason(
    checkpoints: dict[str, Path], backend: Backend
) -> None:
    config = EngineConfig(
        checkpoints["mixtral"],
        num_kv_blocks=32,
        tp_size=2,
        ep_size=2,
        ep_dispatch_min_tokens=EVERY_STEP,
    )
    executor = ProcessExecutor(make_plan(config, backend))
    try:
        os.kill(executor.rank_pids[1], signal.SIGSTOP)  # so that rank 0 waits for its rows
        killer = threading.Timer(1.0, os.kill, (executor.rank_pids[1], signal.SIGKILL))
        killer.start()
        started = time.monotonic()
        with pytest.raises(EngineDead, match="rank 1 of 2 died: killed by SIGKILL"):
            Stepper(executor, chunk=40).generate(requests())
        assert 0.5 < time.monotonic() - started < 20
        killer.join()
    finally:
        executor.close()


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_more_parts_than_experts_are_rejected(
    family: str, backend: Backend, tmp_path: Path
) -> None:
    shape = {"num_attention_heads": 16, "num_key_value_heads": 16}
    directory = write_checkpoint(random_model(family, **shape), tmp_path)
    config = EngineConfig(directory, num_kv_blocks=32, tp_size=8, ep_size=8)
    wanted = {"mixtral": "has 6 experts: use at most 6", "llama": "has no experts: use at most 1"}
    with pytest.raises(ConfigError, match=wanted[family]):
        make_plan(config, backend)


def test_unequal_ranks_per_part_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"ep_size 4 was asked for .* tp_size 6: .*a divisor"):
        EngineConfig(Path("m"), tp_size=6, ep_size=4)
