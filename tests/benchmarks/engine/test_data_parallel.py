"""Two data-parallel ranks beside one rank, in turns: tokens per second of 32 answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import MEDIUM, random_model, write_checkpoint
from support.core_runs import random_prompt, serve_all
from support.figures import Figure, record

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.data_parallel_core import DataParallelCore
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

BATCH = 32
PROMPT_TOKENS = 8
OUTPUT_TOKENS = 48
ROUNDS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

_names = count()

AnyCore = EngineCore | DataParallelCore


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AnyCore, AnyCore]]:
    """One rank, and two with a copy of the model each; one thread per rank."""
    directory = tmp_path_factory.mktemp("llama")
    checkpoint: Path = write_checkpoint(random_model("llama", **MEDIUM), directory)
    alone = EngineConfig(checkpoint, threads=1, num_kv_blocks=1024, prefix_caching=False)
    both = [build_engine(config).core for config in (alone, replace(alone, dp_size=2))]
    yield both[0], both[1]
    for core in both:
        core.close()


def serve(core: AnyCore) -> float:
    """Seconds for a batch of answers."""
    requests = [
        EngineRequest(f"r{next(_names)}", random_prompt(number, PROMPT_TOKENS), GREEDY)
        for number in range(BATCH)
    ]
    start = time.perf_counter()
    outcome = serve_all(core, requests)
    took = time.perf_counter() - start
    assert all(len(answer) == OUTPUT_TOKENS for answer in outcome.answers.values())
    return took


def test_data_parallel(benchmark: Any, cores: tuple[AnyCore, AnyCore]) -> None:
    rounds = [[serve(core) for core in cores] for _ in range(ROUNDS)]
    one, two = (min(turns) for turns in zip(*rounds, strict=True))
    benchmark.pedantic(serve, (cores[1],), rounds=1)
    context = f"{BATCH * OUTPUT_TOKENS / two:.3g} tokens/s"
    name = "engine: DP 2 over one rank, batch 32"
    record(benchmark, Figure(name, one / two, 1.6, "times", context=context))
