"""Models that are sharded in other ways than Llama give the tokens of one rank on several."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_hal.backend import Backend

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model(request.param), tmp_path_factory.mktemp(request.param))


def answers(executor: Executor) -> list[list[int]]:
    try:
        prompts = {"short": (5, 9, 2), "long": tuple(range(100, 190))}
        requests = [RunningRequest(name, prompt) for name, prompt in prompts.items()]
        return Stepper(executor, chunk=40).generate(requests)
    finally:
        executor.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Path, backend: Backend) -> list[list[int]]:
    return answers(
        InProcessExecutor(make_plan(EngineConfig(checkpoint, num_kv_blocks=32), backend), backend)
    )


@pytest.mark.parametrize("tp_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_ranks_give_tokens_of_one_rank(
    tp_size: int, checkpoint: Path, backend: Backend, expected: list[list[int]]
) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=32, tp_size=tp_size)
    assert answers(ProcessExecutor(make_plan(config, backend))) == expected
