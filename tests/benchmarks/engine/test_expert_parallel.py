"""Experts whole on one rank each, beside a slice of every expert on every rank: two ranks, side by
side, in turns."""

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
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
ROUNDS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
SHAPE = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768}
"""Of each expert; with MEDIUM's width, four layers have 57 million parameters in experts."""

_names = count()


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineCore, EngineCore]]:
    """With slices, and with whole experts."""
    model = random_model("mixtral", **{**MEDIUM, **SHAPE, "num_hidden_layers": 4})
    checkpoint: Path = write_checkpoint(model, tmp_path_factory.mktemp("mixtral"))
    sliced = EngineConfig(
        checkpoint, tp_size=2, threads=1, num_kv_blocks=1024, prefix_caching=False
    )
    both = [build_engine(config).core for config in (sliced, replace(sliced, ep_size=2))]
    yield both[0], both[1]
    for core in both:
        core.close()


def serve(core: EngineCore, batch: int) -> float:
    """Seconds for a batch of answers."""
    requests = [
        EngineRequest(f"r{next(_names)}", random_prompt(number, PROMPT_TOKENS), GREEDY)
        for number in range(batch)
    ]
    start = time.perf_counter()
    outcome = serve_all(core, requests)
    took = time.perf_counter() - start
    assert all(len(answer) == OUTPUT_TOKENS for answer in outcome.answers.values())
    return took


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_expert_parallel(batch: int, benchmark: Any, cores: tuple[EngineCore, EngineCore]) -> None:
    rounds = [[serve(core, batch) for core in cores] for _ in range(ROUNDS)]
    sliced, whole = (min(turns) for turns in zip(*rounds, strict=True))
    load = cores[1].stats().experts
    assert load is not None
    benchmark.pedantic(serve, (cores[1], batch), rounds=1)
    rate = batch * OUTPUT_TOKENS / whole
    context = f"{rate:.3g} tokens/s; imbalance {load.imbalance:.3g}"
    name = f"engine: EP 2 over TP 2, batch {batch}"
    record(benchmark, Figure(name, sliced / whole, 1.0, "times", context=context))
