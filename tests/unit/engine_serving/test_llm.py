"""Offline generation over an engine: order, parameters, errors and the end."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.fake_engine import EOS, FakeEngine, saying

from mooncake_engine.errors import EngineDead, InvalidRequest, PromptTooLong
from mooncake_engine.llm import LLM
from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.tokenizer import Tokenizer


@pytest.fixture
def llm(engine: FakeEngine, byte_tokenizer: Tokenizer) -> Iterator[LLM]:
    with LLM.from_engine(engine, byte_tokenizer) as llm:
        yield llm


def test_outputs_come_in_the_prompts_order(llm: LLM) -> None:
    outputs = llm.generate(["tea", "milk", list(b"no")])  # type: ignore[list-item]
    assert [output.outputs[0].text for output in outputs] == ["TEA", "MILK", "NO"]
    assert [output.prompt for output in outputs] == ["tea", "milk", None]
    assert outputs[0].prompt_token_ids == tuple(b"tea")
    assert outputs[0].outputs[0].token_ids == (*b"TEA", EOS)
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    assert [output.outputs[0].text for output in llm.generate("tea")] == ["TEA"]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(
        ["tea", "milk"], [SamplingParams(max_tokens=1), SamplingParams(stop=("LK",))]
    )
    assert [output.outputs[0].text for output in outputs] == ["T", "MI"]
    assert outputs[1].outputs[0].stop_reason == "LK"


def test_several_answers(llm: LLM, engine: FakeEngine) -> None:
    engine.script = saying("one", "two")
    engine.num_cached_tokens = 3
    output = llm.generate("count", SamplingParams(n=2, seed=5, logprobs=0))[0]
    assert [answer.text for answer in output.outputs] == ["one", "two"]
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert len(output.outputs[0].logprobs) == len("one") + 1
    assert sorted(str(request.sampling.seed) for request in engine.seen) == ["5", "6"]
    assert output.num_cached_tokens == 3


def test_chat_with_one_conversation_or_several(llm: LLM, engine: FakeEngine) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    llm.chat(conversation)
    llm.chat([conversation, conversation])
    prompts = {bytes(request.prompt_token_ids) for request in engine.seen}
    assert prompts == {b"<|user|>hi\n<|assistant|>"}
    assert len(engine.seen) == 3


def test_no_more_at_once_than_the_engine_queues(
    engine: FakeEngine, byte_tokenizer: Tokenizer
) -> None:
    engine.config = replace(engine.config, max_queued_requests=2)
    num_live = most = 0

    class Counting(FakeEngine):
        async def _interfere(self, position: int) -> None:
            nonlocal num_live, most
            num_live += position == 0
            most = max(most, num_live)
            await asyncio.sleep(0)
            num_live -= position == 3

    counting = Counting(config=engine.config)
    with LLM.from_engine(counting, byte_tokenizer) as llm:
        assert len(llm.generate(["tea"] * 9)) == 9
    assert most == 2


@pytest.mark.parametrize(
    ("prompts", "error"), [([""], InvalidRequest), (["tea", "x" * 300], PromptTooLong)]
)
def test_a_wrong_prompt_runs_nothing(
    llm: LLM, engine: FakeEngine, prompts: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate(prompts)
    assert engine.seen == []


def test_parameters_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts need one sampling_params or as many"):
        llm.generate(["tea", "milk"], [SamplingParams()])


def test_one_failure_ends_the_others(llm: LLM, engine: FakeEngine) -> None:
    engine.die_at = 1
    with pytest.raises(EngineDead, match="out of luck"):
        llm.generate(["tea", "milk", "no"])
    assert len(engine.left_early) == len(engine.seen)


def test_progress(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("mooncake_engine.progress.sys.stderr", terminal)
    llm.generate(["tea", "milk"], shows_progress=True)
    assert "100 % generating" in terminal.getvalue()


def test_closing_ends_the_engine_once(engine: FakeEngine, byte_tokenizer: Tokenizer) -> None:
    llm = LLM.from_engine(engine, byte_tokenizer)
    llm.close()
    llm.close()
    assert engine.is_closed
