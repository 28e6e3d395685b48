"""What runs before the first request covers what requests would otherwise compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import EnginePlan, make_plan
from mooncake_engine.execution.warm_up import copy_steps, warm_up_requests
from mooncake_hal.registry import Registry


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


def plan_of(model: Path, **options: Any) -> EnginePlan:
    config = EngineConfig(model, memory_utilization=0.5, **options)
    return make_plan(config, Registry.discover().select_backend("cpu"))


def test_where_nothing_is_compiled_one_short_request_is_enough(model: Path) -> None:
    plan = plan_of(model)
    [(prompt, decode)] = warm_up_requests(plan, 100, compiles=False)
    assert prompt.num_tokens == plan.block_size.tokens - 1
    assert decode.num_tokens == 1
    assert prompt.new_requests[0].block_ids == (0,)
    assert prompt.new_requests[0].sampling.is_greedy


@pytest.mark.parametrize(
    ("num_blocks", "lengths"), [(100, [32, 64]), (4, [32]), (3, [32]), (1, [])]
)
def test_kernels_are_run_by_what_they_are_chosen_by(
    num_blocks: int, lengths: list[int], model: Path
) -> None:
    plan = plan_of(model, max_num_batched_tokens=100, max_model_len=128)
    greedy, sampled, *longer = warm_up_requests(plan, num_blocks, compiles=True)
    assert greedy[0].new_requests[0].sampling.is_greedy
    assert not sampled[0].new_requests[0].sampling.is_greedy
    assert [prompt.num_tokens for prompt, _ in longer] == lengths
    for prompt, decode in (greedy, sampled, *longer):
        [request] = prompt.new_requests
        [sequence] = decode.sequences
        assert len(set(request.block_ids)) == len(request.block_ids) <= num_blocks
        room = len(request.block_ids) * plan.block_size.tokens
        assert sequence.start + sequence.count <= room


def test_blocks_are_copied_there_and_back() -> None:
    assert [step.has_host_copies for step in copy_steps(4)] == [False, True, True]
    assert [step.block_copies for step in copy_steps(0)] == [((0, 0),)]
