"""Prefill and decode compared with transformers' generate: same weights, same threads.

Both sides take turns in one run, so that other load on the host affects both; the best of each
counts. The engine's side is the executor: step plans in, tokens out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.checkpoints import MEDIUM, random_model, write_checkpoint
from support.figures import Figure, record
from transformers import PreTrainedModel

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, InProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.registry import Registry

ROUNDS = 5
DECODE_PROMPT = 64
DECODE_STEPS = 16
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sides:
    """The two sides to compare."""

    executor: Executor
    model: PreTrainedModel


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    model = random_model("llama", **MEDIUM)
    directory = write_checkpoint(model, tmp_path_factory.mktemp("llama"))
    config = EngineConfig(directory, num_kv_blocks=1024, block_size=BLOCK_SIZE)
    executor = InProcessExecutor(
        make_plan(config, Registry.discover().select_backend("cpu")),
        Registry.discover().select_backend("cpu"),
    )
    executor.warm_up()
    yield Sides(executor, model)
    executor.close()


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def prompts(batch: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(batch)
    return [
        tuple(torch.randint(3, 32000, (length,), generator=generator).tolist())
        for _ in range(batch)
    ]


def start_requests(executor: Executor, tokens: list[tuple[int, ...]], room: int) -> list[str]:
    """Run the prompts in one step; returns their ids, which replace the requests of earlier
    calls."""
    blocks = -(-(len(tokens[0]) + room) // BLOCK_SIZE)
    new_requests = tuple(
        NewRequest(
            f"r{index}", prompt, len(prompt), GREEDY, 0,
            tuple(range(index * blocks, (index + 1) * blocks)),
        )
        for index, prompt in enumerate(tokens)
    )  # fmt: skip
    sequences = tuple(ScheduledSequence(a.request_id, 0, len(a.token_ids)) for a in new_requests)
    executor.execute_model(StepPlan(0, new_requests=new_requests, sequences=sequences)).result()
    return [request.request_id for request in new_requests]


def decode(executor: Executor, names: list[str]) -> None:
    for step in range(DECODE_STEPS):
        position = DECODE_PROMPT + step
        sequences = tuple(ScheduledSequence(name, position, 1) for name in names)
        executor.execute_model(StepPlan(step + 1, sequences=sequences)).result()


def generate(model: PreTrainedModel, tokens: list[tuple[int, ...]], count: int) -> None:
    input_ids = torch.tensor(tokens)
    options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count}
    with torch.inference_mode():
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            pad_token_id=0,
            **options,
        )


def report(
    benchmark: Any, name: str, tokens: int, elapsed: tuple[float, float], wanted: float
) -> None:
    """Record the speed relative to transformers, from the seconds of the engine and of
    transformers."""
    ours, theirs = elapsed
    context = f"{tokens / ours:.0f} against {tokens / theirs:.0f} tokens/s of transformers"
    record(benchmark, Figure(f"engine: {name}", theirs / ours, wanted, "times", context=context))


@pytest.mark.parametrize("length", [512, 2048])
def test_prefill(length: int, benchmark: Any, sides: Sides) -> None:
    tokens = prompts(1, length)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(seconds(lambda: generate(sides.model, tokens, 1)))
        ours.append(seconds(lambda: start_requests(sides.executor, tokens, 1)))
    benchmark.pedantic(start_requests, (sides.executor, tokens, 1), rounds=ROUNDS)
    report(benchmark, f"prefill of {length} tokens", length, (min(ours), min(theirs)), 1.3)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_decode(batch: int, benchmark: Any, sides: Sides) -> None:
    tokens = prompts(batch, DECODE_PROMPT)
    ours, first, all_of_it = [], [], []
    for _ in range(ROUNDS):
        first.append(seconds(lambda: generate(sides.model, tokens, 1)))
        all_of_it.append(seconds(lambda: generate(sides.model, tokens, DECODE_STEPS + 1)))
        names = start_requests(sides.executor, tokens, DECODE_STEPS + 1)
        ours.append(seconds(lambda names=names: decode(sides.executor, names)))  # type: ignore[misc]
    # a repeated decode overwrites the same positions, so that every round does the same work
    names = start_requests(sides.executor, tokens, DECODE_STEPS + 1)
    benchmark.pedantic(decode, (sides.executor, names), rounds=2)
    theirs = min(all_of_it) - min(first)
    report(benchmark, f"decode, batch {batch}", batch * DECODE_STEPS, (min(ours), theirs), 2.5)


def test_decode_step_against_reading_the_weights(benchmark: Any, sides: Sides) -> None:
    tokens = prompts(1, DECODE_PROMPT)
    names = start_requests(sides.executor, tokens, DECODE_STEPS + 1)
    weights = torch.ones(sides.model.num_parameters() // 2)  # the same number of bytes in float32
    steps, reads = [], []
    for _ in range(4 * ROUNDS):
        steps.append(seconds(lambda: decode(sides.executor, names)) / DECODE_STEPS)
        reads.append(seconds(weights.sum))
    benchmark.pedantic(decode, (sides.executor, names), rounds=2)
    ours, reading = min(steps), min(reads)
    context = f"{ours * 1e3:.2f} ms against {reading * 1e3:.2f} ms for {weights.nbytes >> 20} MiB"
    figure = Figure(
        "engine: a decode step, batch 1, beside reading the weights",
        ours / reading, 1.6, "times", at_least=False, context=context,
    )  # fmt: skip
    record(benchmark, figure)
