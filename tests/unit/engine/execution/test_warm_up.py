"""Warm-up steps compile every kernel that requests would otherwise have to compile."""

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


def test_backend_without_compilation_needs_one_short_request(model: Path) -> None:
    plan = plan_of(model)
    [(prompt, decode)] = warm_up_requests(plan, 100, compiles=False)
    assert prompt.num_tokens == plan.block_size.tokens - 1
    assert decode.num_tokens == 1
    assert prompt.new_requests[0].block_ids == (0,)
    assert prompt.new_requests[0].sampling.is_greedy


@pytest.mark.parametrize(
    ("num_blocks", "lengths"), [(100, [32, 64]), (4, [32]), (3, [32]), (1, [])]
)
def test_warm_up_covers_each_token_count_that_selects_a_kernel(
    num_blocks: int, lengths: list[int], model: Path
) -> None:
    plan = plan_of(model, max_num_batched_tokens=100, max_model_len=128)
    greedy, sampled, mixed, *longer = warm_up_requests(plan, num_blocks, compiles=True)
    assert greedy[0].new_requests[0].sampling.is_greedy
    assert not sampled[0].new_requests[0].sampling.is_greedy
    assert [prompt.num_tokens for prompt, _ in longer] == lengths
    for prompt, decode in (greedy, sampled, mixed, *longer):
        [request] = prompt.new_requests
        sequence = decode.sequences[0]
        assert len(decode.sequences) == 1 + len(decode.new_requests)
        assert len(set(request.block_ids)) == len(request.block_ids) <= num_blocks
        capacity = len(request.block_ids) * plan.block_size.tokens
        assert sequence.start + sequence.count <= capacity


@pytest.mark.parametrize(("budget", "beside"), [(100, 16), (9, 8)])
def test_warm_up_has_a_step_with_a_short_decode_and_a_prompt(
    budget: int, beside: int, model: Path
) -> None:
    """Decode graphs don't replay such a step, so its kernels must be compiled here."""
    plan = plan_of(model, max_num_batched_tokens=budget, max_model_len=128, block_size=16)
    [(_, step)] = [
        pair for pair in warm_up_requests(plan, 4, compiles=True) if pair[1].new_requests
    ]
    [request] = step.new_requests
    assert [(each.start, each.count) for each in step.sequences] == [(15, 1), (0, beside)]
    assert request.block_ids == (3,)
    assert request.request_id == step.sequences[1].request_id != step.sequences[0].request_id
    assert step.num_tokens <= budget


def test_too_small_budget_has_no_mixed_step(model: Path) -> None:
    plan = plan_of(model, max_num_batched_tokens=2, max_model_len=128)
    assert not any(step.new_requests for _, step in warm_up_requests(plan, 4, compiles=True))


def test_copy_steps_cover_host_and_device_copies() -> None:
    assert [step.has_host_copies for step in copy_steps(4)] == [False, True, True]
    assert [step.block_copies for step in copy_steps(0)] == [((0, 0),)]
