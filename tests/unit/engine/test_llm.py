"""Offline generation (``LLM``, ``LLMEngine``) over a real core and a scripted executor."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_engine import EOS, text_script
from support.programs import TINY_LLAMA
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine.config import EngineConfig, ExecutorKind, Role
from mooncake_engine.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    PromptTooLong,
)
from mooncake_engine.llm import LLM
from mooncake_engine.llm_engine import LLMEngine
from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_engine.text.tokenizer import Tokenizer


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handling of Ctrl-C, which a program that was started in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def engine(executor: ScriptedExecutor, byte_tokenizer: Tokenizer) -> LLMEngine:
    return LLMEngine(scripted_engine(executor), byte_tokenizer)


@pytest.fixture
def llm(engine: LLMEngine) -> Iterator[LLM]:
    with LLM.from_engine(engine) as llm:
        yield llm


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(["tea", "milk", list(b"no")])  # type: ignore[list-item]
    assert [output.outputs[0].text for output in outputs] == ["TEA", "MILK", "NO"]
    assert [output.prompt for output in outputs] == ["tea", "milk", None]
    assert outputs[0].prompt_token_ids == tuple(b"tea")
    assert outputs[0].outputs[0].token_ids == (*b"TEA", EOS)
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP


def seeds_of_requests(tokenizer: Tokenizer, seed: int | None) -> list[int]:
    executor = ScriptedExecutor()
    with LLM.from_engine(LLMEngine(scripted_engine(executor, seed=seed), tokenizer)) as llm:
        llm.generate(
            ["tea", "milk", "water"],
            [SamplingParams(), SamplingParams(seed=3), SamplingParams(n=2)],
        )
    return [admitted.seed for admitted in executor.seen]


def test_engine_seed_determines_seeds_of_requests_without_one(byte_tokenizer: Tokenizer) -> None:
    first = seeds_of_requests(byte_tokenizer, 7)
    assert first == seeds_of_requests(byte_tokenizer, 7)
    assert first != seeds_of_requests(byte_tokenizer, 8)
    assert first[1] == 3, "a request's own seed counts"
    assert len(set(first)) == len(first), "choices of one prompt differ, too"


def test_engines_without_a_seed_draw_different_seeds(byte_tokenizer: Tokenizer) -> None:
    assert seeds_of_requests(byte_tokenizer, None) != seeds_of_requests(byte_tokenizer, None)


def test_a_single_prompt_returns_one_output(llm: LLM) -> None:
    assert [output.outputs[0].text for output in llm.generate("tea")] == ["TEA"]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(
        ["tea", "milk"], [SamplingParams(max_tokens=1), SamplingParams(stop=("LK",))]
    )
    assert [output.outputs[0].text for output in outputs] == ["T", "MI"]
    assert outputs[1].outputs[0].stop_reason == "LK"
    outputs = llm.generate(["tea", "milk"], [None, SamplingParams(max_tokens=1)])
    assert [output.outputs[0].text for output in outputs] == ["TEA", "M"]
    with pytest.raises(InvalidRequest, match="must be SamplingParams, got dict"):
        llm.generate("tea", {"n": 2})  # type: ignore[arg-type]


def test_several_choices_share_the_prompt(llm: LLM, executor: ScriptedExecutor) -> None:
    executor.script = text_script("one", "two")
    prompt = "count" * 10
    output = llm.generate(prompt, SamplingParams(n=2, seed=5, logprobs=0))[0]
    assert [answer.text for answer in output.outputs] == ["one", "two"]
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert len(output.outputs[0].logprobs) == len("one") + 1
    assert sorted(str(request.sampling.seed) for request in executor.seen) == ["5", "6"]
    assert llm.generate(prompt)[0].num_cached_tokens == 48


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_returns_the_most_probable_choices(
    llm: LLM, executor: ScriptedExecutor, logprobs: int | None
) -> None:
    executor.script = text_script(
        "three", "one", "four"
    )  # equal per token: short ones are probable
    output = llm.generate("count", SamplingParams(n=2, best_of=3, seed=5, logprobs=logprobs))[0]
    assert [answer.text for answer in output.outputs] == ["one", "four"]
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert [bool(answer.logprobs) for answer in output.outputs] == [logprobs is not None] * 2
    assert len(executor.seen) == 3


def test_the_prefix_cache_can_be_reset(llm: LLM) -> None:
    prompt = "count" * 10
    llm.generate(prompt)
    assert llm.generate(prompt)[0].num_cached_tokens == 48
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt)[0].num_cached_tokens == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_prefix_cache_can_be_reset_after_a_stop_string(
    byte_tokenizer: Tokenizer, steps_in_flight: int
) -> None:
    """Which the core does not know: the caller has its output while the core's request lives."""
    running = scripted_engine(ScriptedExecutor(), steps_in_flight=steps_in_flight)
    llm = LLM.from_engine(LLMEngine(running, byte_tokenizer))
    [output] = llm.generate("count" * 10, SamplingParams(stop=("TC",)))
    assert output.outputs[0].text == "COUN"
    assert llm.reset_prefix_cache()
    assert llm.generate("count" * 10)[0].num_cached_tokens == 0


def test_chat_with_one_conversation_or_several(llm: LLM, executor: ScriptedExecutor) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    llm.chat(conversation)
    llm.chat([conversation, conversation])
    prompts = {bytes(request.token_ids) for request in executor.seen}
    assert prompts == {b"<|user|>hi\n<|assistant|>"}
    assert len(executor.seen) == 3


def test_messages_reach_the_template_as_those_of_the_server_do(
    llm: LLM, executor: ScriptedExecutor
) -> None:
    """Templates take the text of content parts for none, or show them as Python writes them."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    llm.chat(
        [
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    [request] = executor.seen
    expected = b"<|system|>brief\n<|user|>hi\n<|assistant|>\n<|assistant|>"
    assert bytes(request.token_ids) == expected


@pytest.mark.parametrize(
    ("prompts", "error"), [([""], InvalidRequest), (["tea", "x" * 300], PromptTooLong)]
)
def test_an_invalid_prompt_runs_none_of_the_prompts(
    llm: LLM, executor: ScriptedExecutor, prompts: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate(prompts)
    assert executor.seen == []
    assert [output.outputs[0].text for output in llm.generate("tea")] == ["TEA"]
    assert len(executor.seen) == 1


def test_number_of_parameters_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts need one sampling_params or as many"):
        llm.generate(["tea", "milk"], [SamplingParams()])


def test_engine_death_is_raised_to_the_caller(llm: LLM, executor: ScriptedExecutor) -> None:
    executor.die_at = 1
    with pytest.raises(EngineDead, match="out of luck"):
        llm.generate(["tea", "milk", "no"])


@pytest.mark.usefixtures("interrupts")
def test_interrupted_generation_can_be_followed_by_another(
    llm: LLM, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C nearly always comes while a step runs."""
    run = executor.execute_model

    def run_interrupted(plan: StepPlan) -> Any:
        signal.raise_signal(signal.SIGINT)
        return run(plan)

    monkeypatch.setattr(executor, "execute_model", run_interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("tea")
    monkeypatch.undo()
    assert llm.reset_prefix_cache()
    assert llm.generate("milk")[0].outputs[0].text == "MILK"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_updates_of_an_interrupted_step_come_with_the_next(
    engine: LLMEngine, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request("a", "tea")
    run = executor.execute_model

    def run_interrupted(plan: StepPlan) -> Any:
        signal.raise_signal(signal.SIGINT)
        return run(plan)

    text = ""
    with monkeypatch.context() as patched:
        patched.setattr(executor, "execute_model", run_interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    while engine.has_unfinished_requests:
        text += "".join(output.update.text for output in engine.step())
    assert text == "TEA"


@pytest.mark.usefixtures("interrupts")
def test_engine_whose_step_was_broken_off_runs_nothing_more(
    llm: LLM, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(plan: StepPlan) -> Any:
        for _ in range(2):  # impatient
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(executor, "execute_model", run)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("tea")
    monkeypatch.undo()
    with pytest.raises(EngineDead, match="was not completed; create another one"):
        llm.generate("milk")
    with pytest.raises(EngineDead, match="was not completed"):
        llm.reset_prefix_cache()


def test_progress_is_shown_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("mooncake_engine.process.progress_bar.sys.stderr", terminal)
    llm.generate(["tea", "milk"], shows_progress=True)
    assert "100 % generating" in terminal.getvalue()


def test_close_is_idempotent_and_closes_the_executor(llm: LLM, executor: ScriptedExecutor) -> None:
    llm.close()
    llm.close()
    assert executor.is_closed


def finish(engine: LLMEngine) -> dict[tuple[str, int], str]:
    """Step until all requests have finished; return the text of every choice."""
    texts: dict[tuple[str, int], str] = {}
    while engine.has_unfinished_requests:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            key = (update.request_id, update.index)
            texts[key] = texts.get(key, "") + update.update.text
    return texts


def test_a_step_returns_only_new_text(engine: LLMEngine) -> None:
    assert engine.add_request("a", "tea") == tuple(b"tea")
    engine.add_request("b", "no", SamplingParams(n=2))
    first = engine.step()
    assert {(u.request_id, u.index, u.update.text) for u in first} == {
        ("a", 0, "T"),
        ("b", 0, "N"),
        ("b", 1, "N"),
    }
    assert finish(engine) == {("a", 0): "EA", ("b", 0): "O", ("b", 1): "O"}


def test_an_aborted_request_gets_no_more_updates(
    engine: LLMEngine, executor: ScriptedExecutor
) -> None:
    engine.add_request("a", "tea")
    engine.add_request("b", "milk")
    engine.step()
    engine.abort_request("a")
    engine.abort_request("unknown")
    assert finish(engine) == {("b", 0): "ILK"}
    assert executor.live.keys() <= {"b-1-0"}
    engine.add_request("a", "tea")
    assert finish(engine) == {("a", 0): "TEA"}


def test_id_is_free_again_as_soon_as_its_request_was_aborted(engine: LLMEngine) -> None:
    engine.add_request("a", "milk")
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", "tea")
    assert finish(engine) == {("a", 0): "TEA"}


def test_id_is_free_again_once_a_stop_string_has_ended_its_request(engine: LLMEngine) -> None:
    engine.add_request("a", "milk", SamplingParams(stop=("I",)))
    assert finish(engine) == {("a", 0): "M"}
    engine.add_request("a", "tea")
    assert finish(engine) == {("a", 0): "TEA"}


def test_id_of_a_live_request_is_rejected(engine: LLMEngine) -> None:
    engine.add_request("a", "tea")
    with pytest.raises(InvalidRequest, match="a request 'a' is already running"):
        engine.add_request("a", "milk")
    assert finish(engine) == {("a", 0): "TEA"}


def test_request_of_higher_priority_runs_first(byte_tokenizer: Tokenizer) -> None:
    executor = ScriptedExecutor()
    engine = LLMEngine(scripted_engine(executor, max_num_seqs=1), byte_tokenizer)
    engine.add_request("later", "milk", priority=1)
    engine.add_request("sooner", "tea", priority=-1)
    finish(engine)
    assert [request.request_id for request in executor.seen] == ["sooner-1-0", "later-0-0"]


def test_timed_out_request_fails_with_deadline_exceeded(engine: LLMEngine) -> None:
    engine.add_request("a", "tea", timeout_s=1e-9)
    engine.add_request("b", "no")
    updates = engine.step()
    [late] = [update for update in updates if update.request_id == "a"]
    assert isinstance(late.error, DeadlineExceeded)
    assert "not finished within 1e-09 s" in str(late.error)
    assert finish(engine) == {("b", 0): "O"}


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ({"prompt_token_ids": [1, 2]}, "dict"),
        ([{"prompt": "tea"}], "dict"),
        ([116, 101, 97], "int"),
        (5, "int"),
        (b"tea", "bytes"),
        (["tea", None], "NoneType"),
    ],
)
def test_prompts_of_other_types_are_rejected(
    llm: LLM, executor: ScriptedExecutor, prompts: Any, found: str
) -> None:
    words = f"prompts must be a text, several texts, or lists of token ids; found {found}$"
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompts)
    assert not executor.seen


def test_invalid_message_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"at `\$.messages\[0\].role`") as raised:
        llm.chat([{"role": "narrator", "content": "hi"}])
    assert raised.value.param == "messages"


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}])
def test_messages_of_other_types_are_rejected(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="each a dict with role and content"):
        llm.chat(messages)


@pytest.mark.parametrize(
    "values",
    [
        *({"top_k": 5.0}, {"logprobs": 2.0}, {"seed": 1.5}, {"max_tokens": 5.5}),
        *({"temperature": "1"}, {"stop": 5}, {"stop": [5]}, {"stop_token_ids": [1.5]}),
        *({"logit_bias": [1]}, {"logit_bias": [(1, 2, 3)]}, {"grammar": "[0-9]"}),
    ],
)
def test_values_of_other_types_are_rejected(values: dict[str, Any]) -> None:
    """In a step they would end the engine."""
    [name] = values
    with pytest.raises(InvalidRequest, match=f"{name}: wanted") as raised:
        SamplingParams(**values)
    assert raised.value.param == name


def test_values_are_converted_as_in_vllm() -> None:
    given: dict[str, Any] = {
        **{"stop": "###e", "bad_words": "the", "stop_token_ids": None, "logit_bias": {5: 1}},
        **{"logprobs": True, "prompt_logprobs": True, "allowed_token_ids": {70}},
        **{"n": np.int64(2), "top_p": np.float32(0.5), "seed": -1},
    }
    found = SamplingParams(**given)
    assert found == SamplingParams(
        **{
            "stop": ("###e",),
            "bad_words": ("the",),
            "stop_token_ids": (),
            "logit_bias": ((5, 1.0),),
        },
        **{"logprobs": 1, "prompt_logprobs": 1, "allowed_token_ids": (70,)},
        **{"n": 2, "top_p": 0.5, "seed": None},
    )
    numbers = (found.n, found.top_p, found.logprobs, found.logit_bias[0][1])
    assert [type(one) for one in numbers] == [int, float, int, float]


def test_choices_share_long_lists() -> None:
    params = SamplingParams(allowed_token_ids=tuple(range(9)), logit_bias=((5, 1.0),))
    choice = replace(params, seed=3)
    assert choice.allowed_token_ids is params.allowed_token_ids
    assert choice.logit_bias is params.logit_bias


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([116.0, 101.0], {}, "prompt: wanted a whole number"),
        ("tea", {"sampling_params": {"n": 2}}, "must be SamplingParams, got dict"),
        ("tea", {"priority": "high"}, "priority: wanted a whole number"),
        ("tea", {"timeout_s": "1"}, "timeout_s: wanted a number"),
    ],
)
def test_arguments_of_other_types_are_rejected(
    engine: LLMEngine, prompt: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        engine.add_request("r", prompt, **changes)
    assert not engine.has_unfinished_requests


def test_prompt_of_numpy_integers_runs_as_ints(llm: LLM, executor: ScriptedExecutor) -> None:
    """Ranks receive it in messages, which can't hold NumPy's integers."""
    [output] = llm.generate(np.frombuffer(b"tea", np.uint8)[None])  # type: ignore[arg-type]
    assert output.outputs[0].text == "TEA"
    assert {type(token_id) for token_id in executor.seen[0].token_ids} == {int}


class Built(Exception):
    """Carries the configuration that the engine would be built with."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineConfig]:
    def stop(config: EngineConfig) -> None:
        raise Built(config)

    monkeypatch.setattr(LLMEngine, "from_config", stop)

    def build(**options: Any) -> EngineConfig:
        with pytest.raises(Built) as raised:
            LLM(TINY_LLAMA, **options)
        [config] = raised.value.args
        assert isinstance(config, EngineConfig)
        return config

    return build


def test_options_may_be_given_as_on_the_command_line(
    built: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    found = built(
        **{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "kv_cache_bytes": "1G"},
        **{"dtype": "half", "role": "both", "executor": "ray", "served_model_name": "tiny"},
        **{"chat_template": str(tmp_path / "template.jinja"), "swap_space": 2},
        **{"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}},
        **{"enable_prefix_caching": False, "trust_remote_code": False, "max_logprobs": 5},
    )
    assert found == EngineConfig(
        TINY_LLAMA,
        **{"tp_size": 2, "memory_utilization": 0.5, "kv_cache_bytes": 1 << 30, "dtype": "float16"},
        **{"role": Role.BOTH, "executor": ExecutorKind.RAY, "served_model_name": "tiny"},
        **{"chat_template": "{{ messages }}", "swap_space_bytes": 2 << 30},
        speculative_config=SpeculativeConfig(SpeculativeMethod.NGRAM, prompt_lookup_max=3),
        prefix_caching=False,
    )
    assert type(found.executor) is ExecutorKind
    pool = built(kv_pool="dram=1GiB").kv_pool
    assert pool is not None
    assert pool.dram_bytes == 1 << 30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "slurm"}, r"executor must be \['local', 'ray'\], got 'slurm'"),
        ({"kv_cache_bytes": "much"}, "kv_cache_bytes can't be 'much': wanted bytes"),
        ({"kv_pool": "dram"}, "pool"),
        ({"enforce_eager": "yes"}, "enforce_eager must be True or False"),
        ({"chat_template": "/missing"}, "--chat-template /missing can't be read"),
        ({"speculative_config": {"model": "m"}}, "has no method"),
        ({"tp_sise": 2}, "tp_sise is no option of EngineConfig"),
        ({"trust_remote_code": True}, "a checkpoint's code is never run"),
    ],
)
def test_options_of_other_forms_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(TINY_LLAMA, **options)


def test_closed_engine_runs_nothing(llm: LLM, engine: LLMEngine) -> None:
    engine.add_request("live", "tea")
    llm.close()
    for run in (lambda: llm.generate("tea"), lambda: llm.chat([{"role": "user"}]), engine.step):
        with pytest.raises(EngineDead, match="closed; create another one"):
            run()
