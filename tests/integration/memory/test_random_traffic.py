"""Requests of every kind at random, choice by choice, get the answers that each gets alone.

This tests what no single feature's tests do: blocks that are shared, copied, swapped, loaded and
taken away while other requests arrive and leave. ``make test-slow`` runs more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.pd import write_model
from support.random_traffic import Alone, Traffic, check_empty, core_of, differences, random_calls

from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_engine.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 140
SHORT: dict[str, Any] = {
    "num_kv_blocks": 40,
    "block_size": 4,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 48,
    "swap_space_bytes": 1 << 20,
    "async_scheduling": False,
}
"""Memory for about three requests."""
ASYNC = {"async_scheduling": True}
POOL = {"kv_pool": "dram=4M,chunk=16,load=always"}
DRAFTS = {"speculative_config": SpeculativeConfig(SpeculativeMethod.NGRAM, 4, prompt_lookup_min=1)}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": ASYNC,
    "async, drafts, pool": {**ASYNC, **DRAFTS, **POOL},
    "only the pool": {**POOL, "prefix_caching": False},
    "drafts": DRAFTS,
    "async, large blocks": {**ASYNC, "block_size": 16, "num_kv_blocks": 12},
    "async, no swap space": {**ASYNC, "swap_space_bytes": 0},
    "async, two at once": {**ASYNC, "max_num_seqs": 2, "max_num_batched_tokens": 16},
    "async, full pool": {**ASYNC, "kv_pool": "dram=300K,chunk=16,load=always"},
    "two ranks": {**ASYNC, **DRAFTS, **POOL, "tp_size": 2},
    "two stages": {**POOL, "pp_size": 2},
    "two data-parallel ranks": {**ASYNC, **POOL, "dp_size": 2},
}
MAY_FIT = "async, two at once"
"""Two requests fill the memory with some seeds only."""
QUICK = [("llama", config, 100) for config in ("plain", "async", "async, drafts, pool")]
SLOW = [
    (family, config, seed)
    for seed in (100, 107, 200, 201)
    for config in CONFIGS
    for family in ("llama", "deepseek_v2")
    if (family, config, seed) not in QUICK
]
NUM_CALLS = 30


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def alone_of(model_of: Callable[[str], Path]) -> Iterator[Callable[[str], Alone]]:
    with ExitStack() as stack:

        @cache
        def alone(family: str) -> Alone:
            model = model_of(family)
            plenty = {"num_kv_blocks": 64, "max_model_len": MAX_MODEL_LEN, "prefix_caching": False}
            core = stack.enter_context(core_of(model, **plenty, async_scheduling=False))
            return Alone(Traffic(core, Tokenizer.load(model)))

        yield alone


@pytest.mark.parametrize(
    ("family", "config", "seed"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_answers_are_those_of_each_request_alone(
    model_of: Callable[[str], Path],
    alone_of: Callable[[str], Alone],
    family: str,
    config: str,
    seed: int,
) -> None:
    options = {**SHORT, **CONFIGS[config]}
    calls = random_calls(seed, NUM_CALLS, options["block_size"])
    with core_of(model_of(family), **options) as core:
        answers = Traffic(core, Tokenizer.load(model_of(family))).send(calls)
        check_empty(core)
        is_short = core.report().stats.num_preemptions > 0
        assert is_short or config == MAY_FIT, "memory was not short"
    assert not differences(calls, answers, alone_of(family))
