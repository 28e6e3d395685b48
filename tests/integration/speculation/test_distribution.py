"""Tokens sampled with speculation follow the model's distribution.

Chi-square tests over answers with fixed seeds, so that results are the same in every run.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import run_load
from transformers import PreTrainedModel

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

VOCAB = 5
PROMPT = (1, 3, 0, 4, 1, 3, 2, 4, 1, 3)
NUM_ANSWERS = 1500
PARAMS = SamplingParams(temperature=0.9, top_k=4, max_tokens=4, ignore_eos=True)


def model_of(seed: int) -> PreTrainedModel:
    """A tiny model whose logits have a standard deviation of about 1.5."""
    return random_model("llama", seed=seed, vocab_size=VOCAB, num_hidden_layers=1)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return model_of(0)


@pytest.fixture(scope="module")
def paths(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The paths of the model and of another one as its draft model."""
    other = write_checkpoint(model_of(1), tmp_path_factory.mktemp("other"))
    return write_checkpoint(target, tmp_path_factory.mktemp("target")), other


@pytest.fixture(scope="module")
def expected(target: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """The probability of each answer, from the definitions of the sampling parameters."""
    answers = list(product(range(VOCAB), repeat=4))
    with torch.no_grad():
        logits = target(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits
    logits = logits[:, len(PROMPT) - 1 : -1].double() / PARAMS.temperature
    edges = logits.topk(PARAMS.top_k, dim=-1).values[..., -1:]
    shares = logits.masked_fill(logits < edges, -math.inf).softmax(-1)
    chosen = shares.gather(2, torch.tensor(answers).unsqueeze(-1)).squeeze(-1)
    return dict(zip(answers, chosen.prod(dim=1).tolist(), strict=True))


@pytest.mark.parametrize("method", [SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT])
def test_answers_follow_the_models_distribution(
    method: SpeculativeMethod,
    paths: tuple[Path, Path],
    expected: dict[tuple[int, ...], float],
) -> None:
    speculation = (
        SpeculativeConfig(method, 2, paths[1])
        if method is SpeculativeMethod.DRAFT
        else SpeculativeConfig(method, 2, prompt_lookup_min=1)
    )
    requests = [EngineRequest(f"r{index}", PROMPT, PARAMS) for index in range(NUM_ANSWERS)]
    outcome = run_load(
        paths[0],
        requests,
        num_kv_blocks=600,
        speculative_config=speculation,
        max_num_seqs=128,
        seed=0,
    )
    stats = outcome.stats.speculation
    assert stats is not None
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    found = Counter(tuple(answer) for answer in outcome.answers.values())
    assert all(expected[answer] > 0 for answer in found)
    statistic, degrees = chi_square(found, expected)
    assert statistic < degrees + 4 * math.sqrt(2 * degrees), "far from the model's distribution"


def chi_square(
    found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; rare answers count as one."""
    rare = {answer for answer, share in expected.items() if NUM_ANSWERS * share < 5}
    cells = [(found[answer], expected[answer]) for answer in expected if answer not in rare]
    cells.append((sum(found[answer] for answer in rare), sum(expected[answer] for answer in rare)))
    statistic = sum((n - NUM_ANSWERS * p) ** 2 / (NUM_ANSWERS * p) for n, p in cells if p > 0)
    return statistic, len(cells) - 1
