"""A real model under memory pressure gives the same answers, whichever requests are preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import make_load, run_load

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
OUTPUT_TOKENS = 40
PLENTY = 200
THIRD = 24
"""KV blocks: the load below needs 72 at its end."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
RANDOM = SamplingParams(temperature=1.0, max_tokens=OUTPUT_TOKENS)
MIX = (1, 3, 1, 2, 1, 3, 1, 2, 1)
"""Choices per prompt: 15 sequences of five blocks; those of one prompt share two."""


@pytest.mark.parametrize(
    ("sampling", "prefix_caching"), [(GREEDY, True), (RANDOM, False)], ids=["greedy", "random"]
)
def test_one_third_of_the_memory_gives_same_tokens(
    checkpoint: Path, sampling: SamplingParams, prefix_caching: bool
) -> None:
    requests = make_load(sampling, sizes=MIX)
    options: dict[str, Any] = {"prefix_caching": prefix_caching, "block_size": BLOCK_SIZE}
    plenty = run_load(checkpoint, requests, num_kv_blocks=PLENTY, **options)
    short = run_load(checkpoint, requests, num_kv_blocks=THIRD, **options)
    assert short.answers == plenty.answers
    assert plenty.stats.num_preemptions == 0
    assert short.stats.num_swap_outs > 0, "no group was swapped"
    assert short.stats.num_preemptions > short.stats.num_swap_outs, "nothing was recomputed"
    assert short.stats.num_swapped == 0


def test_groups_without_swap_space_are_recomputed(checkpoint: Path) -> None:
    requests = make_load(GREEDY, sizes=MIX)
    plenty = run_load(checkpoint, requests, num_kv_blocks=PLENTY)
    short = run_load(checkpoint, requests, num_kv_blocks=THIRD, swap_space_bytes=0)
    assert short.answers == plenty.answers
    assert short.stats.num_swap_outs == 0
    assert short.stats.num_preemptions > 0


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_group_gives_answers_of_single_requests(checkpoint: Path, sampling: SamplingParams) -> None:
    together = make_load(sampling, sizes=(4, 2))
    alone = [
        EngineRequest(request.request_id, request.prompt_token_ids, request.sampling)
        for request in together
    ]
    grouped = run_load(checkpoint, together, num_kv_blocks=PLENTY)
    single = run_load(checkpoint, alone, num_kv_blocks=PLENTY, prefix_caching=False)
    assert grouped.answers == single.answers


def test_latents_are_swapped(tmp_path: Path) -> None:
    latent = write_checkpoint(random_model("deepseek_v2"), tmp_path)
    requests = make_load(GREEDY, sizes=(1, 3, 3))
    plenty = run_load(latent, requests, num_kv_blocks=PLENTY)
    short = run_load(latent, requests, num_kv_blocks=18)
    assert short.answers == plenty.answers
    assert short.stats.num_swap_outs > 0


@pytest.mark.parametrize("size", ["tp_size", "pp_size"])
def test_every_rank_swaps(checkpoint: Path, size: str) -> None:
    requests = make_load(GREEDY, sizes=(1, 3, 3))
    plenty = run_load(checkpoint, requests, num_kv_blocks=PLENTY)
    short = run_load(checkpoint, requests, num_kv_blocks=18, **{size: 2})
    assert short.answers == plenty.answers
    assert short.stats.num_swap_outs > 0
