"""``--seed``: requests without their own seed get reproducible tokens."""

from __future__ import annotations

from pathlib import Path

from mooncake_engine import LLM, SamplingParams

MODEL = Path(__file__).parents[3] / "examples" / "tiny-llama"


def sampled(seed: int) -> list[list[int]]:
    """Three answers sampled at a high temperature."""
    params = SamplingParams(max_tokens=12, temperature=4.0, n=3)
    with LLM(str(MODEL), seed=seed, threads=1, num_kv_blocks=64) as llm:
        [answer] = llm.generate("A language model", params)
        return [list(output.token_ids) for output in answer.outputs]


def test_same_seed_repeats_tokens_and_other_seed_does_not() -> None:
    first = sampled(7)
    assert sampled(7) == first
    assert sampled(8) != first
