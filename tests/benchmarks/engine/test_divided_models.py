"""Two ranks that divide a model, compared in turns with an alternative.

Two data-parallel ranks are compared with one rank, and whole experts per rank with a slice of every
expert on both ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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

ROUNDS = 5
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768}
"""Size of each expert; with MEDIUM's width, four layers have 57 million parameters in experts."""

_names = count()

AnyCore = EngineCore | DataParallelCore
Cores = tuple[AnyCore, AnyCore]


@contextmanager
def beside(checkpoint: Path, usual: dict[str, Any], divided: dict[str, Any]) -> Iterator[Cores]:
    """Engines on two cores with one thread per rank; options are fields of ``EngineConfig``."""
    config = EngineConfig(checkpoint, threads=1, num_kv_blocks=1024, prefix_caching=False)
    cores = [build_engine(replace(config, **options)).core for options in (usual, divided)]
    try:
        yield cores[0], cores[1]
    finally:
        for core in cores:
            core.close()


def serve(core: AnyCore, batch: int, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """Seconds for one batch of answers."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    requests = [
        EngineRequest(f"r{next(_names)}", random_prompt(number, num_prompt_tokens), greedy)
        for number in range(batch)
    ]
    start = time.perf_counter()
    outcome = serve_all(core, requests)
    elapsed = time.perf_counter() - start
    assert all(len(answer) == num_output_tokens for answer in outcome.answers.values())
    return elapsed


def compare(benchmark: Any, cores: Cores, *load: int) -> tuple[float, float]:
    """Seconds of both sides, each the best of its turns."""
    rounds = [[serve(core, *load) for core in cores] for _ in range(ROUNDS)]
    benchmark.pedantic(serve, (cores[1], *load), rounds=1)
    usual, divided = (min(turns) for turns in zip(*rounds, strict=True))
    return usual, divided


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    """One rank, and two ranks with a copy of the model each."""
    model = random_model("llama", **MEDIUM)
    checkpoint: Path = write_checkpoint(model, tmp_path_factory.mktemp("llama"))
    with beside(checkpoint, {}, {"dp_size": 2}) as cores:
        yield cores


def test_data_parallel(benchmark: Any, data_parallel: Cores) -> None:
    batch, num_output_tokens = 32, 48
    one, two = compare(benchmark, data_parallel, batch, 8, num_output_tokens)
    context = f"{batch * num_output_tokens / two:.3g} tokens/s"
    name = "engine: DP 2 over one rank, batch 32"
    record(benchmark, Figure(name, one / two, 1.6, "times", context=context))


@pytest.fixture(scope="module")
def expert_parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    """Two ranks with slices of experts, and two with whole experts."""
    model = random_model("mixtral", **{**MEDIUM, **EXPERTS, "num_hidden_layers": 4})
    checkpoint: Path = write_checkpoint(model, tmp_path_factory.mktemp("mixtral"))
    with beside(checkpoint, {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}) as cores:
        yield cores


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_expert_parallel(batch: int, benchmark: Any, expert_parallel: Cores) -> None:
    num_output_tokens = 32
    sliced, whole = compare(benchmark, expert_parallel, batch, 64, num_output_tokens)
    load = expert_parallel[1].stats().experts
    assert load is not None
    rate = batch * num_output_tokens / whole
    context = f"{rate:.3g} tokens/s; imbalance {load.imbalance:.3g}"
    name = f"engine: EP 2 over TP 2, batch {batch}"
    record(benchmark, Figure(name, sliced / whole, 1.0, "times", context=context))
