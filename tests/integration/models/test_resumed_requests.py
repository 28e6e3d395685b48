"""A request's answer depends on its tokens, seed and position only, not on the instance or the
blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.stepping import GREEDY, RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.backend import Backend
from mooncake_hal.kv.layout import KV_LAYOUTS

PROMPT = tuple(range(60, 120))
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=16),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02, max_tokens=16),
    SamplingParams(
        temperature=0.7, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.5,
        presence_penalty=0.2, min_tokens=9,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def executor(checkpoint: Path, backend: Backend) -> Iterator[InProcessExecutor]:
    executor = InProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=64), backend), backend
    )
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(executor: InProcessExecutor) -> list[list[int]]:
    return [
        Stepper(executor).generate([RunningRequest("alone", PROMPT, sampling, seed=5)])[0]
        for sampling in SAMPLINGS
    ]


def test_same_tokens_in_batch_and_alone(
    executor: InProcessExecutor, expected: list[list[int]]
) -> None:
    requests = [
        RunningRequest(f"r{index}", PROMPT, sampling, seed=5)
        for index, sampling in enumerate(SAMPLINGS)
    ]
    noise = [RunningRequest(f"noise{length}", tuple(range(length))) for length in (1, 7, 70)]
    found = Stepper(executor, chunk=23).generate([noise[0], *requests, *noise[1:]])
    assert found[1:5] == expected


@pytest.mark.parametrize("known", [1, 2, 9])
def test_same_tokens_when_resumed_elsewhere(
    known: int, executor: InProcessExecutor, expected: list[list[int]]
) -> None:
    """As after preemption by recomputation, or on a decode instance that continues from P's
    token."""
    for sampling, tokens in zip(SAMPLINGS, expected, strict=True):
        before = tuple(tokens[:known])
        new_request = NewRequest("on", PROMPT + before, len(PROMPT), sampling, 5, (9, 4, 33, 2, 1))
        start = len(PROMPT) + known
        plan = StepPlan(
            0, new_requests=(new_request,), sequences=(ScheduledSequence("on", 0, start),)
        )
        found = [executor.execute_model(plan).result().tokens["on"][0].token_id]
        for position in range(start, start + 16 - known - 1):
            step = StepPlan(1, sequences=(ScheduledSequence("on", position, 1),))
            found.append(executor.execute_model(step).result().tokens["on"][0].token_id)
        assert found == tokens[known:]
    executor.execute_model(StepPlan(2, removed=("on",))).result()


@pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
@pytest.mark.parametrize("block_size", [4, 32])
def test_same_tokens_in_every_layout_and_block_size(
    layout: str, block_size: int, checkpoint: Path, backend: Backend, expected: list[list[int]]
) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=64, kv_layout=layout, block_size=block_size)
    executor = InProcessExecutor(make_plan(config, backend), backend)
    executor.warm_up()
    found = Stepper(executor).generate([RunningRequest("r", PROMPT, SAMPLINGS[2], seed=5)])
    assert found == [expected[2]]
    executor.close()


def test_copied_block_is_independent(
    executor: InProcessExecutor, expected: list[list[int]]
) -> None:
    """Two choices share a prompt's blocks; the partial last block is copied before they diverge."""
    first = NewRequest("a", PROMPT, len(PROMPT), GREEDY, 5, (0, 1, 2, 3))
    prompt = ScheduledSequence("a", 0, len(PROMPT))
    executor.execute_model(StepPlan(0, new_requests=(first,), sequences=(prompt,))).result()
    sampling = SAMPLINGS[1]
    other = NewRequest("b", (*PROMPT, expected[1][0]), len(PROMPT), sampling, 5, (0, 1, 2, 40))
    tokens: dict[str, list[int]] = {"a": [expected[0][0]], "b": [expected[1][0]]}
    for step in range(4):
        plan = StepPlan(
            step + 1,
            new_requests=(other,) if step == 0 else (),
            block_copies=((3, 40),) if step == 0 else (),
            sequences=tuple(ScheduledSequence(name, len(PROMPT) + step, 1) for name in tokens),
        )
        for name, sampled in executor.execute_model(plan).result().tokens.items():
            tokens[name] += [token.token_id for token in sampled]
    assert tokens == {"a": expected[0][:5], "b": expected[1][:5]}
    executor.execute_model(StepPlan(9, removed=("a", "b"))).result()


def test_bfloat16_is_within_rounding_of_transformers(tmp_path: Path, backend: Backend) -> None:
    model = random_model("llama", dtype="bfloat16", tie_word_embeddings=True)
    config = EngineConfig(write_checkpoint(model, tmp_path), num_kv_blocks=16)
    executor = InProcessExecutor(make_plan(config, backend), backend)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    request = RunningRequest("r", PROMPT, sampling)
    Stepper(executor).generate([request])
    executor.close()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    theirs = logits.float().log_softmax(-1)
    assert executor.info.geometry.dtype == "bfloat16"
    logprobs = request.sampled[0].logprobs
    assert logprobs is not None
    for token, logprob in logprobs.top:
        assert logprob == pytest.approx(float(theirs[token]), abs=0.1)


def test_step_plan_with_unknown_request_ends_executor(checkpoint: Path, backend: Backend) -> None:
    executor = InProcessExecutor(
        make_plan(EngineConfig(checkpoint, num_kv_blocks=4), backend), backend
    )
    with pytest.raises(EngineDead, match="rank 0 failed in step 7"):
        executor.execute_model(StepPlan(7, sequences=(ScheduledSequence("ghost", 0, 1),))).result()
    with pytest.raises(EngineDead, match="rank 0 failed"):
        executor.check()
    executor.close()
