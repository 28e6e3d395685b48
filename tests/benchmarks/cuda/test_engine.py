"""An engine's decode steps on a GPU, compared with its kernels, its bandwidth and transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_timing import seconds_in_kernels
from support.decoding import Decoder
from support.figures import Figure, record
from support.speed_models import LLAMA_8B, random_llama, read_rate
from transformers import PreTrainedModel

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_hal.backend import Backend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(1800),
    # warnings of torch's compiler about transformers are not our failures
    pytest.mark.filterwarnings("default"),
]
PROMPT, STEPS, ROUNDS = 128, 64, 5
HOST_SHARE = 1.1
"""Limit of a step relative to its kernels. Without async scheduling, the host adds 0.4 ms to 5 ms
of kernels; ``make bench-host`` measures async scheduling (``--async-scheduling``) over HTTP."""


@dataclass(frozen=True)
class Sides:
    """Our engine with one sequence in flight, and transformers with the same weights."""

    decoder: Decoder
    model: PreTrainedModel


@pytest.fixture(scope="module")
def sides(cuda: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    model = random_llama(LLAMA_8B, cuda.runtime.device(0))
    directory = tmp_path_factory.mktemp("eight-b")
    model.save_pretrained(directory)
    with closing(executor_of(directory, cuda)) as executor:
        yield Sides(Decoder(executor, [prompt()], 2 * STEPS), model)


def executor_of(directory: Path, backend: Backend) -> InProcessExecutor:
    """A warmed-up engine with 1024 blocks; its memory is the smaller part."""
    config = EngineConfig(
        directory, backend=backend.name, dtype="bfloat16", num_kv_blocks=1024, max_num_seqs=1
    )
    executor = InProcessExecutor(make_plan(config, backend), backend)
    executor.warm_up()
    return executor


def prompt() -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(3, 1000, (PROMPT,), generator=generator).tolist())


def seconds_per_step(run: Callable[[], object], steps: int) -> float:
    """The best of several rounds, after one warm-up round."""
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / steps)
    return min(times[1:])


def ours_per_step(sides: Sides) -> float:
    def run() -> None:
        for _ in range(STEPS):
            sides.decoder.step()

    return seconds_per_step(run, STEPS)


def test_step_against_its_kernels(benchmark: Any, sides: Sides) -> None:
    step, kernels = ours_per_step(sides), seconds_in_kernels(sides.decoder.step, STEPS)
    times = f"{step * 1e3:.2f} against {kernels * 1e3:.2f} ms"
    title = "engine: a decode step beside its kernels"
    record(benchmark, Figure(title, step / kernels, HOST_SHARE, "times", False, times))
    benchmark(sides.decoder.step)


def test_step_against_reading_the_weights(benchmark: Any, cuda: Backend, sides: Sides) -> None:
    """Embeddings are looked up; all other weights are read once."""
    bound = LLAMA_8B.weight_bytes / read_rate(cuda, LLAMA_8B.copy_bytes)
    step = ours_per_step(sides)
    times = f"{step * 1e3:.2f} ms for {LLAMA_8B.weight_bytes / 1e9:.1f} GB, {1 / step:.0f} tokens/s"
    title = "engine: single-stream decode of an 8B shape"
    record(benchmark, Figure(title, bound / step, 0.8, "of copy", context=times))
    benchmark(sides.decoder.step)


def test_decode_against_transformers(benchmark: Any, sides: Sides) -> None:
    """Transformers with its static cache, compiled by its own default; the prompt's time is
    subtracted."""
    tokens = torch.tensor([prompt()], device=sides.model.device)
    sides.model.generation_config.eos_token_id = None  # no stop token, and no check for one

    def generate(count: int) -> float:
        def run() -> None:
            found = sides.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                cache_implementation="static",
            ).tolist()
            assert len(found[0]) == PROMPT + count

        return seconds_per_step(run, 1)

    theirs = (generate(STEPS + 1) - generate(1)) / STEPS
    step = ours_per_step(sides)
    times = f"{1 / step:.0f} against {1 / theirs:.0f} tokens/s"
    title = "engine: single-stream decode beside transformers"
    record(benchmark, Figure(title, theirs / step, 1.5, "times", context=times))
    benchmark(sides.decoder.step)
