"""A real model with too little memory answers as it does with plenty, whatever gave way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import AddRequest
from mooncake_engine.kv_transfer.params import Handoff
from mooncake_engine.messages import EngineRequest, EngineStats
from mooncake_engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 37
"""Two blocks and part of a third."""
OUTPUT_TOKENS = 40
PLENTY = 200
THIRD = 24
"""Blocks: the load below needs 72 of them at its end."""


@dataclass(frozen=True)
class Outcome:
    """What came of a load, and what it took."""

    answers: dict[str, list[int]]
    stats: EngineStats


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


def prompt(number: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(3, 300, (PROMPT_TOKENS,), generator=generator).tolist())


def load(sampling: SamplingParams, *, sizes: Sequence[int]) -> list[EngineRequest]:
    """Prompts with as many answers each as ``sizes`` says; seeds by answer."""
    return [
        EngineRequest(
            f"p{number}-{index}",
            prompt(number),
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                ignore_eos=True,
                seed=100 * number + index,
            ),
            group=f"p{number}" if size > 1 else None,
        )
        for number, size in enumerate(sizes)
        for index in range(size)
    ]


def run(checkpoint: Path, requests: Sequence[EngineRequest], **options: object) -> Outcome:
    options = {"swap_space_bytes": 4 << 20, "dtype": "float32", "threads": 1, **options}
    config = EngineConfig(checkpoint, **options)  # type: ignore[arg-type]  # fields by name
    core = build_engine(config).core
    try:
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            core.post(AddRequest(request, Handoff()))
        num_live = len(requests)
        while num_live:
            for update in core.step():
                answers[update.request_id] += update.token_ids
                num_live -= update.finish is not None
            core.check_integrity()
        return Outcome(answers, core.stats())
    finally:
        core.close()


GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
RANDOM = SamplingParams(temperature=1.0, max_tokens=OUTPUT_TOKENS)
MIX = (1, 3, 1, 2, 1, 3, 1, 2, 1)
"""Answers per prompt: 15 sequences of five blocks, those of a prompt share two."""


@pytest.mark.parametrize(
    ("sampling", "prefix_caching"), [(GREEDY, True), (RANDOM, False)], ids=["greedy", "random"]
)
def test_a_third_of_the_memory_gives_the_same_tokens(
    checkpoint: Path, sampling: SamplingParams, prefix_caching: bool
) -> None:
    requests = load(sampling, sizes=MIX)
    options = {"prefix_caching": prefix_caching, "block_size": BLOCK_SIZE}
    plenty = run(checkpoint, requests, num_kv_blocks=PLENTY, **options)
    short = run(checkpoint, requests, num_kv_blocks=THIRD, **options)
    assert short.answers == plenty.answers
    assert plenty.stats.num_preemptions == 0
    assert short.stats.num_swap_outs > 0, "no group was swapped"
    assert short.stats.num_preemptions > short.stats.num_swap_outs, "nothing was computed again"
    assert short.stats.num_swapped == 0


def test_without_swap_space_groups_are_computed_again(checkpoint: Path) -> None:
    requests = load(GREEDY, sizes=MIX)
    plenty = run(checkpoint, requests, num_kv_blocks=PLENTY)
    short = run(checkpoint, requests, num_kv_blocks=THIRD, swap_space_bytes=0)
    assert short.answers == plenty.answers
    assert short.stats.num_swap_outs == 0
    assert short.stats.num_preemptions > 0


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_answers_of_a_group_are_those_of_single_requests(
    checkpoint: Path, sampling: SamplingParams
) -> None:
    together = load(sampling, sizes=(4, 2))
    alone = [
        EngineRequest(request.request_id, request.prompt_token_ids, request.sampling)
        for request in together
    ]
    grouped = run(checkpoint, together, num_kv_blocks=PLENTY)
    single = run(checkpoint, alone, num_kv_blocks=PLENTY, prefix_caching=False)
    assert grouped.answers == single.answers


def test_latents_are_swapped_too(tmp_path: Path) -> None:
    latent = write_checkpoint(random_model("deepseek_v2"), tmp_path)
    requests = load(GREEDY, sizes=(1, 3, 3))
    plenty = run(latent, requests, num_kv_blocks=PLENTY)
    short = run(latent, requests, num_kv_blocks=18)
    assert short.answers == plenty.answers
    assert short.stats.num_swap_outs > 0


def test_every_rank_swaps(checkpoint: Path) -> None:
    requests = load(GREEDY, sizes=(1, 3, 3))
    plenty = run(checkpoint, requests, num_kv_blocks=PLENTY)
    short = run(checkpoint, requests, num_kv_blocks=18, tp_size=2)
    assert short.answers == plenty.answers
    assert short.stats.num_swap_outs > 0
