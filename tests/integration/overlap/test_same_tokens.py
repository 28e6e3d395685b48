"""Async scheduling changes no token, whatever ends or delays answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.core_runs import run_load
from support.pd import ask, ask_pair, instance, pair, prompt_of
from support.push import ask_pushed, push_pair

from mooncake_engine.execution.async_model_runner import AsyncModelRunner, SampledTokenBuffer
from mooncake_engine.execution.model_runner import ModelRunner
from mooncake_engine.llm import LLM
from mooncake_engine.messages import EngineRequest, FinishReason
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

CHUNK = 48
PLENTY, THIRD = 128, 26
"""Number of KV blocks of 16 tokens: the load needs 70."""


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **fields})


def seeded(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.1, "max_tokens": 24, "seed": 5, **fields})


WAYS = {
    "greedy": greedy(ignore_eos=True),
    "short": greedy(max_tokens=1),
    "stopped": seeded(seed=6, stop_token_ids=tuple(range(3, 40))),
    "filtered": seeded(top_p=0.7, top_k=50),
    "penalised": greedy(repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=20),
    "described": seeded(logprobs=3, presence_penalty=0.4),
    "explained": seeded(logprobs=2, prompt_logprobs=1),
}
ON_DEVICE = tuple(way for way in WAYS if way != "explained")
"""Sampling parameters whose steps need not wait for the host."""
LENGTHS = (7, 16, 60, 110)


def load(ways: dict[str, SamplingParams]) -> list[EngineRequest]:
    """Every kind of sampling at several lengths, some with two or three choices per prompt."""
    return [
        EngineRequest(
            f"{way}-{length}-{index}",
            prompt_of(length),
            sampling,
            group=f"{way}-{length}" if size > 1 else None,
        )
        for number, (way, sampling) in enumerate(ways.items())
        for length, size in zip(LENGTHS, (1, 2, 1, 3 if number == 2 else 1), strict=True)
        for index in range(size)
    ]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many sampled tokens stayed on the device, and how many steps waited for the host."""
    counts: Counter[str] = Counter()
    fill, settle = SampledTokenBuffer.fill, AsyncModelRunner._complete

    def count_fed(feed: SampledTokenBuffer, tokens: Any, at: Any, states: Any) -> None:
        counts["fed"] += len(states)
        fill(feed, tokens, at, states)

    def count_waits(runner: AsyncModelRunner, num_left: int) -> None:
        counts["waits"] += num_left == 0
        settle(runner, num_left)

    monkeypatch.setattr(SampledTokenBuffer, "fill", count_fed)
    monkeypatch.setattr(AsyncModelRunner, "_complete", count_waits)
    return counts


@pytest.mark.parametrize("num_blocks", [PLENTY, THIRD], ids=["plenty", "third"])
@pytest.mark.parametrize("ways", [ON_DEVICE, tuple(WAYS)], ids=["on the device", "all"])
def test_one_rank(model: Path, seen: Counter[str], num_blocks: int, ways: tuple[str, ...]) -> None:
    requests = load({way: WAYS[way] for way in ways})
    options: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "num_kv_blocks": num_blocks}
    expected = run_load(model, requests, **options)
    found = run_load(model, requests, async_scheduling=True, **options)
    assert found.answers == expected.answers
    assert seen["fed"], "no sampled token stayed on the device"
    assert bool(seen["waits"]) == ("explained" in ways)
    assert (found.stats.num_preemptions > 0) == (num_blocks == THIRD)
    for name in expected.answers:
        ends = [outcome.updates[name][-1].finish for outcome in (found, expected)]
        assert ends[0] is ends[1]
        if name.startswith(("described", "explained")):
            entries_of_both = [
                [logprobs for update in outcome.updates[name] for logprobs in update.logprobs or ()]
                for outcome in (found, expected)
            ]
            assert [entry.token_id for entry in entries_of_both[0]] == [
                entry.token_id for entry in entries_of_both[1]
            ]
            assert [entry.logprob for entry in entries_of_both[0]] == pytest.approx(
                [entry.logprob for entry in entries_of_both[1]], abs=1e-4
            )


def test_drafts_when_few_requests_run_and_async_steps_otherwise(
    model: Path, seen: Counter[str]
) -> None:
    """The long answers remain when the others have completed, and are few enough to be drafted."""
    long = greedy(ignore_eos=True, max_tokens=60)
    requests = load({"long": long, **{way: WAYS[way] for way in ("filtered", "penalised")}})
    drafts = SpeculativeConfig(
        SpeculativeMethod.NGRAM, 3, prompt_lookup_min=1, disable_by_batch_size=6
    )
    options: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "num_kv_blocks": PLENTY}
    expected = run_load(model, requests, **options)
    options |= {"async_scheduling": True, "speculative_config": drafts}
    found = run_load(model, requests, **options)
    assert found.answers == expected.answers
    assert seen["fed"], "no step was scheduled ahead"
    assert found.stats.speculation is not None
    assert found.stats.speculation.num_drafts > 0


def test_two_ranks(model: Path) -> None:
    requests = load(WAYS)
    options: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "num_kv_blocks": THIRD}
    expected = run_load(model, requests, **options)
    found = run_load(model, requests, async_scheduling=True, tp_size=2, **options)
    assert found.answers == expected.answers


def test_stop_strings_and_grammars(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of these requests waits for its own tokens."""
    prompts = [f"prompt {number}" for number in range(5)]
    ways = [
        seeded(stop=("a", "e", "\n"), max_tokens=200),
        seeded(n=3, best_of=3, seed=9),
        greedy(grammar=Grammar(GrammarKind.REGEX, "[a-f]{4,9}(x|y)"), max_tokens=30),
        seeded(
            grammar=Grammar(GrammarKind.REGEX, "([a-z]+ ){3,8}!"), n=2, best_of=2, max_tokens=40
        ),
        greedy(ignore_eos=True),
    ]
    answers = []
    for is_on in (False, True):
        if is_on:
            monkeypatch.setattr(ModelRunner, "_finish_step", None)
        with LLM(model, num_kv_blocks=64, threads=1, async_scheduling=is_on) as llm:
            outputs = llm.generate(prompts, ways)
        answers.append([(o.text, o.token_ids, o.finish_reason) for r in outputs for o in r.outputs])
    assert answers[0] == answers[1]
    assert answers[0][0][2] is FinishReason.STOP


def test_pulled_and_pushed(model: Path, seen: Counter[str]) -> None:
    options: dict[str, Any] = {"async_scheduling": True, "max_num_batched_tokens": CHUNK}
    cases = [
        (prompt_of(length), way) for length in (5, 100) for way in (greedy(), seeded(top_p=0.8))
    ]

    async def main() -> None:
        async with instance(model) as single:
            expected = [await ask(single, prompt, way) for prompt, way in cases]
        async with pair(model, **options) as both:
            pulled = await asyncio.gather(*(ask_pair(both, prompt, way) for prompt, way in cases))
            await both.check_clean()
        async with push_pair(model, **options) as both_pushed:
            pushed = await asyncio.gather(
                *(ask_pushed(both_pushed, prompt, way) for prompt, way in cases)
            )
            await both_pushed.check_clean()
        for found in (pulled, pushed):
            assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]

    asyncio.run(main())
    assert seen["fed"] > 0
