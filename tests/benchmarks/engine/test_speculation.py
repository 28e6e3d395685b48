"""Decoding with and without prompt lookup, compared where an answer repeats itself.

The weights are random except for the head: it is built so that each token of a cycle is followed by
the next one, as in text that is copied or edited. The comparison is of the engines' work for the
same tokens, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import MEDIUM, random_model, write_checkpoint
from support.core_runs import Outcome, serve_all
from support.figures import Figure, record

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

CYCLE = 24
"""Period in tokens after which an answer repeats."""
PROMPT_TOKENS = 4 * CYCLE
OUTPUT_TOKENS = 50
NUM_DRAFTS = 4
ROUNDS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

_names = count()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("llama", **MEDIUM)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding *= 40  # the layers' contribution no longer changes the direction
        head = model.get_output_embeddings().weight
        for token in range(CYCLE):
            head[(token + 1) % CYCLE] = embedding[token]
    return write_checkpoint(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cores(checkpoint: Path) -> Iterator[tuple[EngineCore, EngineCore]]:
    """An engine core without draft tokens, and one with them."""
    plain = EngineConfig(checkpoint, num_kv_blocks=1024, prefix_caching=False)
    speculation = SpeculativeConfig(SpeculativeMethod.NGRAM, NUM_DRAFTS)
    both = [build_engine(c).core for c in (plain, replace(plain, speculative_config=speculation))]
    yield both[0], both[1]
    for core in both:
        core.close()


def serve(core: EngineCore, batch: int) -> tuple[float, Outcome]:
    """Seconds for a batch of answers, and the answers."""
    prompt = [index % CYCLE for index in range(PROMPT_TOKENS)]
    requests = [
        EngineRequest(f"r{next(_names)}", tuple(prompt[index:]), GREEDY) for index in range(batch)
    ]
    start = time.perf_counter()
    outcome = serve_all(core, requests)
    return time.perf_counter() - start, outcome


@pytest.mark.parametrize("batch", [1, 4])
def test_prompt_lookup(batch: int, benchmark: Any, cores: tuple[EngineCore, EngineCore]) -> None:
    rounds = [[serve(core, batch) for core in cores] for _ in range(ROUNDS)]
    plain, drafted = (min(elapsed for elapsed, _ in turns) for turns in zip(*rounds, strict=True))
    (_, without), (_, found) = rounds[-1]
    assert list(found.answers.values()) == list(without.answers.values())
    num_steps = max(len(updates) for updates in found.updates.values())
    benchmark.pedantic(serve, (cores[1], batch), rounds=1)
    name = f"engine: prompt lookup, batch {batch}"
    context = (
        f"{OUTPUT_TOKENS / num_steps:.1f} tokens per step; {drafted:.2f} s, without {plain:.2f}"
    )
    record(benchmark, Figure(name, plain / drafted, 1.5, "times", context=context))
