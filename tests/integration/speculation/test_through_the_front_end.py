"""Several tokens per step through the API: texts, stop strings, grammars, streams, usage and
metrics."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.asgi import AsgiClient
from support.pd import make_config, write_model

from mooncake_engine.async_engine import AsyncEngine
from mooncake_engine.llm import LLM, RequestOutput
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.server.app import create_app
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_engine.text.tokenizer import Tokenizer

EOS = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=EOS)


def drafts(model: Path) -> SpeculativeConfig:
    return SpeculativeConfig(SpeculativeMethod.DRAFT, 4, model)


def generate(model: Path, sampling: list[SamplingParams], **options: Any) -> list[RequestOutput]:
    prompts = [f"tea and {number} cups" for number in range(len(sampling))]
    with LLM(model, num_kv_blocks=128, threads=1, **options) as llm:
        return llm.generate(prompts, sampling)


def test_stop_string_ends_answer_within_a_step(model: Path) -> None:
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    texts = [output.outputs[0].text for output in generate(model, [free] * 6)]
    numbers = random.Random(1)
    stopping = []
    for text in texts:
        at = numbers.randrange(len(text) // 2, len(text) - 2)
        stopping.append(
            SamplingParams(
                temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, stop=(text[at : at + 2],)
            )
        )
    plain = generate(model, stopping)
    assert any(output.outputs[0].stop_reason for output in plain)
    assert generate(model, stopping, speculative_config=drafts(model)) == plain


@pytest.mark.parametrize("method", list(SpeculativeMethod))
def test_grammars_constrain_drafts(model: Path, method: SpeculativeMethod) -> None:
    """Also if an answer completes in the middle of a draft."""
    schema = '{"type":"array","items":{"enum":["tea","teapot","te"]},"minItems":2,"maxItems":4}'
    grammars = [
        Grammar(GrammarKind.JSON_SCHEMA, schema),
        Grammar(GrammarKind.REGEX, "(ab|ba){5,20}"),
        Grammar(GrammarKind.REGEX, "tea"),
    ]
    sampling = [
        SamplingParams(temperature=temperature, seed=5, max_tokens=80, grammar=grammar)
        for grammar in grammars
        for temperature in (0.0, 1.0)
    ]
    plain = generate(model, sampling)
    assert plain[4].outputs[0].text == "tea"
    is_draft = method is SpeculativeMethod.DRAFT
    speculation = SpeculativeConfig(
        method, 4, model if is_draft else None, None if is_draft else 1, None if is_draft else 4
    )
    with LLM(model, num_kv_blocks=128, threads=1, speculative_config=speculation) as llm:
        prompts = [f"tea and {number} cups" for number in range(len(sampling))]
        assert llm.generate(prompts, sampling) == plain
        stats = llm._engine._core.report().stats.speculation
        assert stats is not None
        assert stats.num_accepted_tokens > 0


def test_stream_has_one_chunk_per_step_and_usage_counts_tokens(model: Path) -> None:
    config = make_config(model, speculative_config=drafts(model))
    engine = AsyncEngine.start(config)
    try:
        client = AsgiClient(create_app(engine, Tokenizer.load(model)))
        body = {
            "model": model.name, "prompt": "tea", "max_tokens": 41, "temperature": 0.0,
            "ignore_eos": True, "logprobs": 1,
        }  # fmt: skip
        whole = client.post("/v1/completions", **body).json()
        events = client.stream("/v1/completions", **body, stream_options={"include_usage": True})
        chunks = [event["choices"][0] for event in events if event["choices"]]
        assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][0]["text"]
        logprobs = [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(
            whole["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4
        )
        assert events[-1]["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == len(logprobs) == 41
        assert len(chunks) < 20, "41 tokens arrive five at a time"
        found = samples(client.get("/metrics").text)
    finally:
        engine.close()
    assert found["vllm:generation_tokens_total"] == 82
    name = "vllm:spec_decode_num_{}_total"
    accepted = found[name.format("accepted_tokens")]
    assert 0 < found[name.format("drafts")] < accepted <= found[name.format("draft_tokens")]
    by_position = [found[name.format("accepted_tokens_per_pos") + str(i)] for i in range(4)]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


def samples(text: str) -> dict[str, float]:
    """Metrics by name and by label values."""
    return {
        sample.name + sample.labels.get("position", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
