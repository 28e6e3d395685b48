"""Speculation changes no token and needs fewer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import Outcome, make_load, random_prompt, run_load

from mooncake_engine.messages import EngineRequest, FinishReason
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

PLENTY = 200
THIRD = 24
"""KV blocks: the largest load below needs 72 at its end."""
OUTPUT_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
RANDOM = SamplingParams(temperature=0.8, max_tokens=OUTPUT_TOKENS)
MIX = (1, 3, 1, 2)
NGRAM = SpeculativeConfig(SpeculativeMethod.NGRAM, 4, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, except that there is one layer instead of three."""
    model = random_model("llama", num_hidden_layers=1)
    return write_checkpoint(model, tmp_path_factory.mktemp("small"))


def draft(model: Path, num_tokens: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig(SpeculativeMethod.DRAFT, num_tokens, model)


in_turn_and_ahead = pytest.mark.parametrize(
    "async_scheduling", [False, True], ids=["in turn", "ahead"]
)


def check_same(
    model: Path, requests: list[EngineRequest], plain: Outcome, **options: Any
) -> Outcome:
    found = run_load(model, requests, **{"num_kv_blocks": PLENTY, **options})
    assert found.answers == plain.answers
    assert found.stats.speculation is not None
    assert found.stats.speculation.num_draft_tokens > 0
    return found


@in_turn_and_ahead
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "seeded"])
def test_every_draft_method(
    llama: Path, small: Path, sampling: SamplingParams, *, async_scheduling: bool
) -> None:
    """Requests have their own seeds: answers must not depend on the number of drafts."""
    requests = make_load(sampling, sizes=MIX)
    plain = run_load(llama, requests, num_kv_blocks=PLENTY)
    assert plain.stats.speculation is None
    options: dict[str, Any] = {"async_scheduling": async_scheduling}
    check_same(llama, requests, plain, speculative_config=NGRAM, **options)
    check_same(llama, requests, plain, speculative_config=draft(small), **options)
    options |= {"max_num_batched_tokens": 16, "block_size": 4, "num_kv_blocks": 4 * PLENTY}
    check_same(llama, requests, plain, speculative_config=draft(small), **options)


def test_drafts_of_identical_model_are_always_accepted(llama: Path) -> None:
    requests = make_load(GREEDY, sizes=MIX)
    plain = run_load(llama, requests, num_kv_blocks=PLENTY)
    found = check_same(llama, requests, plain, speculative_config=draft(llama))
    stats = found.stats.speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 0.97 * stats.num_draft_tokens
    assert max(len(updates) for updates in found.updates.values()) <= 1 + OUTPUT_TOKENS // 3


def test_drafts_of_identical_model_without_seeds_are_accepted(llama: Path) -> None:
    """Drafts are sampled from the same distribution that they are verified against."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    requests = [EngineRequest(f"r{i}", random_prompt(i), sampling) for i in range(6)]
    found = run_load(llama, requests, num_kv_blocks=PLENTY, speculative_config=draft(llama))
    stats = found.stats.speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 0.97 * stats.num_draft_tokens


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_latent_attention_and_experts(family: str, llama: Path, tmp_path: Path) -> None:
    model = write_checkpoint(random_model(family), tmp_path)
    requests = make_load(GREEDY, sizes=(1, 2))
    plain = run_load(model, requests, num_kv_blocks=PLENTY)
    check_same(model, requests, plain, speculative_config=NGRAM)
    check_same(model, requests, plain, speculative_config=draft(llama))
    found = check_same(model, requests, plain, speculative_config=draft(model))
    assert found.stats.speculation is not None
    assert found.stats.speculation.num_accepted_tokens > 60


@in_turn_and_ahead
@pytest.mark.parametrize("drafts_for_itself", [False, True])
def test_memory_for_a_third_of_the_load(
    llama: Path, small: Path, *, drafts_for_itself: bool, async_scheduling: bool
) -> None:
    """Groups are swapped, single sequences are recomputed, and draft tokens displace no request."""
    requests = make_load(GREEDY, sizes=(1, 3, 1, 2, 1, 3, 1, 2, 1))
    plain = run_load(llama, requests, num_kv_blocks=PLENTY)
    speculation = draft(llama if drafts_for_itself else small)
    options = {"num_kv_blocks": THIRD, "speculative_config": speculation}
    found = check_same(llama, requests, plain, async_scheduling=async_scheduling, **options)
    assert found.stats.num_swap_outs > 0
    assert found.stats.num_preemptions > found.stats.num_swap_outs


@in_turn_and_ahead
def test_every_rank_drafts_the_same(llama: Path, *, async_scheduling: bool) -> None:
    requests = make_load(RANDOM, sizes=(1, 2))
    plain = run_load(llama, requests, num_kv_blocks=PLENTY)
    options: dict[str, Any] = {"tp_size": 2, "async_scheduling": async_scheduling}
    found = check_same(llama, requests, plain, speculative_config=draft(llama), **options)
    assert found.stats.speculation is not None
    assert found.stats.speculation.num_accepted_tokens > 60


SHAPED = [
    replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    replace(RANDOM, seed=7, repetition_penalty=1.2, top_k=30, min_p=0.01),
    replace(GREEDY, logit_bias=((40, 9.0), (41, 9.0))),
    replace(RANDOM, seed=4, allowed_token_ids=tuple(range(40, 60))),
    replace(
        RANDOM,
        seed=5,
        allowed_token_ids=(40, 41, 42, 43),
        bad_words_token_ids=((42,), (40, 41), (41, 43, 43)),
    ),
    replace(GREEDY, logprobs=3, prompt_logprobs=2),
    replace(RANDOM, seed=3, logprobs=0, min_tokens=30, stop_token_ids=tuple(range(0, 300, 7))),
    replace(GREEDY, stop_token_ids=tuple(range(0, 300, 9))),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=2),
]
"""Parameters that depend on a token's position in its answer, or on the tokens before it."""


@in_turn_and_ahead
def test_parameters_that_depend_on_past_tokens_and_mid_step_ends(
    llama: Path, *, async_scheduling: bool
) -> None:
    requests = [
        EngineRequest(f"r{index}", random_prompt(index), sampling)
        for index, sampling in enumerate(SHAPED)
    ]
    plain = run_load(llama, requests, num_kv_blocks=PLENTY)
    options: dict[str, Any] = {"async_scheduling": async_scheduling}
    for speculation in (NGRAM, draft(llama, 5)):
        found = check_same(llama, requests, plain, speculative_config=speculation, **options)
        for name in plain.updates:
            assert ends(found, name) == ends(plain, name)
            assert scores(found, name) == pytest.approx(scores(plain, name), abs=1e-4)
        assert len(scores(plain, "r5")) == 36 + OUTPUT_TOKENS


def ends(outcome: Outcome, name: str) -> tuple[FinishReason | None, int | None]:
    """The finish reasons of the answers."""
    last = outcome.updates[name][-1]
    return last.finish, last.stop_token_id


def scores(outcome: Outcome, name: str) -> list[float]:
    """Log probabilities of prompts and answers."""
    updates = outcome.updates[name]
    prompt = [entry.logprob for update in updates for entry in update.prompt_logprobs]
    return prompt + [entry.logprob for update in updates for entry in update.logprobs or ()]


def test_to_the_end_of_the_context(llama: Path) -> None:
    sampling = replace(GREEDY, max_tokens=None, ignore_eos=True)
    requests = [EngineRequest("r", random_prompt(1), sampling)]
    options = {"max_model_len": 61, "num_kv_blocks": 4}
    plain = run_load(llama, requests, **options)
    for speculation in (NGRAM, draft(llama, 7)):
        found = check_same(llama, requests, plain, speculative_config=speculation, **options)
        assert len(found.answers["r"]) == 61 - len(random_prompt(1))


def test_draft_model_with_short_context_drafts_within_it(llama: Path, tmp_path: Path) -> None:
    short = write_checkpoint(random_model("llama", max_position_embeddings=50), tmp_path)
    requests = make_load(GREEDY, sizes=(1,))
    plain = run_load(llama, requests, num_kv_blocks=PLENTY)
    found = check_same(llama, requests, plain, speculative_config=draft(short))
    assert found.stats.speculation is not None
    assert 0 < found.stats.speculation.num_draft_tokens < 20
