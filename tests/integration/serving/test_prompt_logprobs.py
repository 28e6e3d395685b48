"""Log probabilities of prompts agree with ``transformers``, however the prompt is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from support.byte_tokenizer import write_byte_tokenizer
from support.checkpoints import random_model, write_checkpoint
from transformers import PreTrainedModel

from mooncake_engine.llm import LLM, RequestOutput
from mooncake_engine.sampling_params import SamplingParams

PROMPT = tuple((7 * i * i + 3 * i) % 250 for i in range(93))
SAMPLING = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return random_model("llama")


@pytest.fixture(scope="module")
def model_dir(oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(write_checkpoint(oracle, tmp_path_factory.mktemp("random")))


def make_llm(model_dir: Path, **options: Any) -> LLM:
    return LLM(model_dir, **{"num_kv_blocks": 64, "threads": 1, **options})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """Prompts run in chunks of 32."""
    with make_llm(model_dir, max_num_batched_tokens=32) as llm:
        yield llm


@torch.inference_mode()
def expected_logprobs(oracle: PreTrainedModel, prompt: tuple[int, ...]) -> torch.Tensor:
    """[tokens, vocab]: log probabilities of every token given the preceding ones."""
    logits = oracle(torch.tensor([prompt])).logits[0, :-1]
    return logits.float().log_softmax(dim=-1)


def check(output: RequestOutput, oracle: PreTrainedModel, num_top: int = 3) -> None:
    prompt = output.prompt_token_ids
    expected = expected_logprobs(oracle, prompt)
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for entry, token_id, row in zip(output.prompt_logprobs, prompt[1:], expected, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=2e-3)
        assert entry.rank == pytest.approx(int((row > row[token_id]).sum()) + 1, abs=1)
        best = row.topk(num_top)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-3)


def test_whole_and_in_chunks(model_dir: Path, llm: LLM, oracle: PreTrainedModel) -> None:
    [chunked] = llm.generate([PROMPT], SAMPLING)
    check(chunked, oracle)
    with make_llm(model_dir) as in_one:
        [whole] = in_one.generate([PROMPT], SAMPLING)
    check(whole, oracle)
    assert whole.outputs == chunked.outputs


def test_cached_prefix_is_recomputed(llm: LLM, oracle: PreTrainedModel) -> None:
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [first], [cached] = (llm.generate([PROMPT], plain) for _ in range(2))
    assert cached.num_cached_tokens > 64
    [scored] = llm.generate([PROMPT], SAMPLING)
    assert scored.num_cached_tokens == 0
    check(scored, oracle)
    assert first.outputs == cached.outputs == scored.outputs


def test_in_batch_with_others(llm: LLM, oracle: PreTrainedModel) -> None:
    prompts = [PROMPT[i : i + 30] for i in range(0, 60, 10)] + [(65,)]
    plain = SamplingParams(temperature=0, max_tokens=9)
    wanted = [plain if i % 3 == 1 else SAMPLING for i in range(len(prompts))]
    for output, sampling in zip(llm.generate(prompts, wanted), wanted, strict=True):
        if sampling is SAMPLING:
            check(output, oracle)
        else:
            assert output.prompt_logprobs == ()


def test_preempted_between_chunks(model_dir: Path, oracle: PreTrainedModel) -> None:
    """Blocks for two full answers while four requests run: some are recomputed, and no log
    probability is reported twice."""
    long = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=3, ignore_eos=True)
    prompts = [PROMPT[i : i + 60] for i in range(4)]
    with make_llm(
        model_dir, num_kv_blocks=16, max_model_len=160, max_num_batched_tokens=48
    ) as tight:
        for output in tight.generate(prompts, long):
            check(output, oracle)
        assert tight._engine._core.report().stats.num_preemptions > 0


@pytest.mark.parametrize("stream", [False, True])
def test_through_the_openai_client(tiny_llama_url: str, *, stream: bool) -> None:
    page = "Put both on one machine and they get in each other's way."
    with OpenAI(base_url=f"{tiny_llama_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny-llama",
            prompt=page,
            echo=True,
            logprobs=1,
            max_tokens=8,
            temperature=0,
            stream=stream,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    assert text == page + " A long "
    tokens, offsets, values = ([], [], [])  # type: ignore[var-annotated]
    for choice in choices:
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
            values += choice.logprobs.token_logprobs
    assert "".join(tokens) == text
    assert all(text[o:].startswith(token) for o, token in zip(offsets, tokens, strict=True))
    assert values[0] is None
    # the model was trained on this page and repeats it
    assert sum(values[10:]) / len(values[10:]) > math.log(0.8)


def test_for_every_choice_of_a_prompt(tiny_llama_url: str) -> None:
    with OpenAI(base_url=f"{tiny_llama_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny-llama",
            prompt=["Reading is a sprint; writing", "is a long walk"],
            n=2,
            echo=True,
            logprobs=0,
            max_tokens=3,
            seed=1,
        )
    shown = [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs]
    assert [values[0] for values in shown] == [None] * 4
    assert [len(values) for values in shown] == [31, 31, 17, 17]
    for first, second, length in ((0, 1, 28), (2, 3, 14)):
        assert shown[first][1:length] == pytest.approx(shown[second][1:length], abs=1e-4)
