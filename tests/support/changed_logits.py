"""Requests that change or report their logits, and the outputs that any device must give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mooncake_engine.execution.model_runner import ModelRunner
from mooncake_engine.llm import LLM, CompletionOutput
from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams

FIRST, SECOND, THIRD = 70, 80, 90
"""Tokens that the biases prefer, in this order, whatever the model's logits are."""
BIASES = ((FIRST, 1000.0), (SECOND, 900.0), (THIRD, 800.0))
PROMPT = (40, 41, 42)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **fields})


REQUESTS = {
    "plain": greedy(),
    "biased": greedy(logit_bias=BIASES),
    "drawn": greedy(temperature=1.0, seed=3, top_k=20, top_p=0.9, logit_bias=BIASES),
    "penalised": greedy(
        repetition_penalty=1.3, frequency_penalty=2.0, presence_penalty=1.0, logit_bias=BIASES
    ),
    "longer": greedy(min_tokens=2, stop_token_ids=(FIRST,), logit_bias=BIASES),
    "restricted": greedy(allowed_token_ids=(SECOND, THIRD), logit_bias=BIASES),
    "without words": greedy(
        bad_words_token_ids=((FIRST, FIRST), (SECOND, SECOND), (THIRD,)), logit_bias=BIASES
    ),
    "described": greedy(logprobs=3, logit_bias=BIASES),
    "structured": greedy(
        ignore_eos=False, max_tokens=9, grammar=Grammar(GrammarKind.REGEX, "(ab){2}")
    ),
    "drawn and structured": SamplingParams(
        seed=5, max_tokens=9, grammar=Grammar(GrammarKind.REGEX, "[a-c]{3}x")
    ),
}
"""A repeated token's logit falls to 1000 / 1.3 or less, so "penalised" samples the third token
before it repeats the first."""
TOKENS = {
    "biased": (FIRST,) * 4,
    "drawn": (FIRST,) * 4,
    "penalised": (FIRST, SECOND, THIRD, FIRST),
    "longer": (SECOND, SECOND, FIRST),
    "restricted": (SECOND,) * 4,
    "without words": (FIRST, SECOND, FIRST, SECOND),
    "described": (FIRST,) * 4,
}


def check_changed_logits(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], tolerance: float
) -> None:
    """A device with async scheduling serves all of these requests in one batch, and no step waits
    for its own tokens.

    Args:
        model: a checkpoint with a byte tokenizer.
        monkeypatch: the test's.
        options: of the engine on the device.
        tolerance: of the device's log probabilities against the CPU's.
    """
    sizes = {"num_kv_blocks": 32, "threads": 1}
    with LLM(model, **{**sizes, "backend": "cpu"}) as on_cpu:
        [alone] = on_cpu.generate([PROMPT], [REQUESTS["described"]])
    monkeypatch.setattr(ModelRunner, "_finish_step", None)
    with LLM(model, **{**sizes, **options, "async_scheduling": True}) as on_device:
        outputs = on_device.generate([PROMPT] * len(REQUESTS), list(REQUESTS.values()))
    found = dict(zip(REQUESTS, (each.outputs[0] for each in outputs), strict=True))
    _check(found, alone.outputs[0], tolerance)


def _check(
    found: dict[str, CompletionOutput], described: CompletionOutput, tolerance: float
) -> None:
    assert {name: found[name].token_ids for name in TOKENS} == TOKENS
    assert len(found["plain"].token_ids) == 4
    assert found["longer"].finish_reason is FinishReason.STOP
    assert found["structured"].text == "abab"
    assert re.fullmatch("[a-c]{3}x", found["drawn and structured"].text)
    pairs = zip(found["described"].logprobs, described.logprobs, strict=True)
    for ours, theirs in pairs:  # log probabilities are the model's, before any bias
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerance)
        values = [[value for _, value in each.top] for each in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=tolerance)
