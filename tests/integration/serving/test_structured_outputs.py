"""A model with random weights, which generates noise by itself, follows every grammar."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from support.pd import ask, ask_pair, instance, pair, prompt_of, wait_until, write_model

from mooncake_engine.async_engine import AsyncEngine
from mooncake_engine.errors import GrammarFailed
from mooncake_engine.llm import LLM
from mooncake_engine.messages import EngineRequest, FinishReason
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.text import grammar_compiler, grammars
from mooncake_engine.text.grammars import json_schema_grammar

EOS = 256
NUM_SCHEMAS = 40
COMPILE_S = 4.0
SLOW_COMPILER = f"""
import sys, time
if "rank_process" in " ".join(sys.orig_argv):
    from mooncake_engine.text.grammar_compiler import GrammarCompiler
    compile_grammar = GrammarCompiler.compile
    def slow(self, grammar):
        time.sleep({COMPILE_S})
        return compile_grammar(self, grammar)
    GrammarCompiler.compile = slow
"""


def random_schema(numbers: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with bounded values, so that an answer that never ends is a failure."""
    kinds = ["string", "integer", "boolean", "enum", "null", "pattern", "number"]
    kind = numbers.choice(kinds if depth == 2 else [*kinds, "object", "array", "object", "array"])
    if kind == "string":
        return {"type": "string", "minLength": numbers.randrange(3), "maxLength": 6}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{3}$"}
    if kind == "integer":
        return {"type": "integer", "minimum": numbers.randrange(-50, 0), "maximum": 1000}
    if kind == "number":
        return {"enum": [0.5, -1e9, 3]}
    if kind == "enum":
        return {"enum": ["té", 'a "cup"', 7, None, {"of": ["it"]}]}
    if kind == "array":
        items = random_schema(numbers, depth + 1)
        return {"type": "array", "items": items, "minItems": numbers.randrange(2), "maxItems": 3}
    if kind == "object":
        names = numbers.sample(["a", "b", "größe", "some name", "e"], numbers.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(numbers, depth + 1) for name in names},
            "required": numbers.sample(names, numbers.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    return {"type": kind}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("random"), eos_token_id=EOS, max_position_embeddings=2048
    )


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, num_kv_blocks=1500, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match_random_schemas(llm: LLM, temperature: float) -> None:
    schemas = [random_schema(random.Random(f"schema {i}")) for i in range(NUM_SCHEMAS)]
    sampling = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=None, grammar=json_schema_grammar(schema)
        )
        for i, schema in enumerate(schemas)
    ]
    for schema, output in zip(schemas, llm.generate(["Tea:"] * NUM_SCHEMAS, sampling), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason is FinishReason.STOP, (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema)


def test_unconstrained_requests_in_batch_are_not_masked(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bound = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(ab){3}"), max_tokens=None)
    penalised = replace(plain, presence_penalty=1.0)
    [alone, punished] = llm.generate(["Tea"] * 2, [plain, penalised])
    together = llm.generate(["Tea"] * 4, [bound, plain, bound, penalised])
    assert [together[i].outputs[0].text for i in (0, 2)] == ["ababab"] * 2
    assert together[1].outputs == alone.outputs
    assert together[3].outputs == punished.outputs


def test_allowed_token_ids_restrict_a_grammar(llm: LLM) -> None:
    """Its end is always allowed; one that allows none of them fails the request."""
    free, sampled = Grammar(GrammarKind.REGEX, "[a-z]{9}"), tuple(b"xyz")
    restricted = SamplingParams(grammar=free, allowed_token_ids=sampled, max_tokens=None)
    [fine] = llm.generate(["Tea"], restricted)
    assert re.fullmatch("[xyz]{9}", fine.outputs[0].text)
    assert fine.outputs[0].finish_reason is FinishReason.STOP
    impossible = replace(restricted, grammar=Grammar(GrammarKind.REGEX, "[a-z]{3}[0-9]"))
    with pytest.raises(GrammarFailed, match="the grammar allows none of allowed_token_ids"):
        llm.generate(["Tea"], impossible)


def test_preempted_answer_keeps_its_grammar_state(model_dir: Path) -> None:
    sampling = SamplingParams(
        temperature=1.0, seed=3, max_tokens=None, grammar=Grammar(GrammarKind.REGEX, "[a-z]{200}")
    )
    options = {"num_kv_blocks": 24, "max_model_len": 300, "threads": 1}
    with LLM(model_dir, **options) as tight:
        for output in tight.generate(["one", "two", "six"], sampling):
            assert re.fullmatch("[a-z]{200}", output.outputs[0].text)
        assert tight._engine._core.report().stats.num_preemptions > 0


def test_choices_of_one_prompt_keep_separate_grammar_states(model_dir: Path) -> None:
    """The choices share the prompt's blocks, are preempted together, and resume."""
    sampling = SamplingParams(
        n=3, seed=5, max_tokens=None, grammar=Grammar(GrammarKind.REGEX, "[a-z]{150}")
    )
    options = {"num_kv_blocks": 48, "max_model_len": 300, "threads": 1}
    with LLM(model_dir, **options) as tight:
        for output in tight.generate(["one" * 20, "two" * 20, "six" * 20], sampling):
            texts = [answer.text for answer in output.outputs]
            assert len(set(texts)) == 3
            assert all(re.fullmatch("[a-z]{150}", text) for text in texts)
        assert tight._engine._core.report().stats.num_preemptions > 0


def test_pair_gives_same_answer(model_dir: Path) -> None:
    """The decode instance advances the grammar past the token that the prefill instance sampled."""

    async def scenario() -> None:
        async with instance(model_dir) as single, pair(model_dir) as both:
            for seed in range(6):
                schema = random_schema(random.Random(f"apart {seed}"))
                sampling = SamplingParams(
                    seed=seed, max_tokens=400, grammar=json_schema_grammar(schema)
                )
                expected = await ask(single, prompt_of(40), sampling)
                found = await ask_pair(both, prompt_of(40), sampling)
                assert found.tokens == expected.tokens
                assert found.finish is FinishReason.STOP
                text = bytes(found.tokens[:-1]).decode()
                jsonschema.validate(json.loads(text), schema)
            await both.check_clean()

    asyncio.run(scenario())


def test_grammar_violation_fails_only_its_request(model_dir: Path) -> None:
    async def scenario() -> None:
        async with instance(model_dir) as single:
            wrong = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "("), max_tokens=None)
            right = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "tea"), max_tokens=None)
            failed, answered = await asyncio.gather(
                ask(single, prompt_of(9), wrong), ask(single, prompt_of(9), right)
            )
            assert failed.finish is FinishReason.GRAMMAR
            assert "regular expression is rejected" in (failed.error or "")
            assert bytes(answered.tokens[:-1]) == b"tea"
            await single.check_clean()

    asyncio.run(scenario())


def test_too_complex_grammar_fails_only_its_request(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_vocabularies", {})
    monkeypatch.setattr(grammar_compiler, "_MAX_LEXER_STATES", 400)
    grammars.vocabulary_in.cache_clear()
    growing = Grammar(GrammarKind.REGEX, "(a|b)*a(a|b){12}")

    async def scenario() -> None:
        async with instance(model_dir) as single:
            sampling = SamplingParams(
                temperature=2.0,
                max_tokens=1500,
                seed=1,
                grammar=growing,
                logit_bias=((EOS, -100.0),),
            )
            right = replace(sampling, grammar=Grammar(GrammarKind.REGEX, "tea"))
            failed, answered = await asyncio.gather(
                ask(single, prompt_of(9), sampling), ask(single, prompt_of(9), right)
            )
            assert failed.finish is FinishReason.GRAMMAR
            assert "can't be followed any further" in (failed.error or "")
            assert len(failed.tokens) > 1
            assert bytes(answered.tokens[:-1]) == b"tea"
            await single.check_clean()

    asyncio.run(scenario())
    grammars.vocabulary_in.cache_clear()


@pytest.mark.usefixtures("ranks_import_anew")
def test_ranks_compile_new_grammar_in_background(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another answer continues while two ranks compile a grammar for seconds."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_COMPILER)
    monkeypatch.syspath_prepend(tmp_path)  # ranks inherit it
    tea, hot = (
        SamplingParams(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, word))
        for word in ("tea", "hot")
    )

    async def note_arrivals(engine: AsyncEngine, times: list[float]) -> None:
        sampling = SamplingParams(max_tokens=1900, ignore_eos=True)
        updates = engine.generate(EngineRequest("other", prompt_of(9), sampling))
        async with aclosing(updates):
            async for _ in updates:
                times.append(time.monotonic())

    async def scenario() -> None:
        async with instance(model_dir, tp_size=2, num_kv_blocks=256) as single:
            await ask(single, prompt_of(9), hot)  # the tokenizer is loaded once
            times: list[float] = []
            other = asyncio.create_task(note_arrivals(single.engine, times))
            await wait_until(lambda: bool(times), 30.0, lambda: "no token")
            began = time.monotonic()
            answer = await ask(single, prompt_of(9), tea)
            ended = time.monotonic()
            assert bytes(answer.tokens[:-1]) == b"tea"
            assert ended - began > COMPILE_S
            assert sum(began < at < began + COMPILE_S for at in times) > 10
            await ask(single, prompt_of(9), tea)
            assert time.monotonic() - ended < COMPILE_S
            other.cancel()
            with suppress(asyncio.CancelledError):
                await other
            await single.check_clean()

    asyncio.run(scenario())


def test_through_the_openai_client(tiny_llama_url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"cups": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["cups"],
        "additionalProperties": False,
    }
    with OpenAI(base_url=f"{tiny_llama_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny-llama",
            messages=[{"role": "user", "content": "How many cups?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "order", "schema": schema, "strict": True},
            },
        )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
