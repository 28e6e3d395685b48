"""Offline generation: ``LLM`` runs the engine in the caller's thread."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from mooncake_engine.checkpoints.model_source import find_model
from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, InvalidRequest
from mooncake_engine.kv_connector import engine_errors
from mooncake_engine.llm_engine import LLMEngine, OutputUpdate
from mooncake_engine.messages import FinishReason, TokenLogprobs
from mooncake_engine.process.progress_bar import ProgressBar
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.server.input_processor import tokenize_chat
from mooncake_engine.server.openai_protocol import ChatRequest
from mooncake_engine.speculative_config import SpeculativeConfig
from mooncake_engine.text.completion_output import ChoiceOutput, best_choices
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.vllm_flags import vllm_words, without_vllm_flags
from mooncake_hal.options import Option, byte_count, options_of

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt.

    Args:
        index: index among the ``n`` outputs.
        text, token_ids: the output, without its stop string; the ids include a stop token.
        logprobs: one per token, if requested.
        finish_reason: why it ended.
        stop_reason: the requested stop string or stop token that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt's outputs.

    Args:
        prompt: text of the prompt; None if token ids were given.
        prompt_token_ids: token ids of the prompt.
        outputs: the ``n`` outputs.
        num_cached_tokens: prompt tokens found in the prefix cache.
        prompt_logprobs: one per prompt token from the second one on, if requested.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class LLM:
    """Generates text with a model from a Hugging Face directory, or from a hub by name.

    ``with LLM("models/llama") as llm: llm.generate("Once upon a time")``

    Args:
        model: a directory, a GGUF file, or ``ORG/NAME[@REVISION]``.
        options: fields of ``EngineConfig``; also under their names and with values as on the
            command line, such as ``tensor_parallel_size`` and ``kv_cache_bytes="4G"``.

    Raises:
        ConfigError, CheckpointError: the engine can't be set up as configured.
        DownloadFailed: the model can't be fetched.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        values = _engine_options(options)
        directory = find_model(model, "model").directory
        self._engine = LLMEngine.from_config(EngineConfig(model=directory, **values))
        self._num_prompts = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Returns an LLM for a complete configuration; raises like the constructor."""
        return cls.from_engine(LLMEngine.from_config(config))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Returns an LLM over an engine, which it owns and closes."""
        llm = cls.__new__(cls)
        llm._engine = engine
        llm._num_prompts = 0
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts, in one batch; returns them in the prompts' order.

        Args:
            prompts: a text, several texts, or lists of token ids.
            sampling_params: for all prompts, or one per prompt; None: the model's own.
            shows_progress: whether to draw a progress bar on standard error.

        Raises:
            InvalidRequest: a prompt or its sampling parameters are invalid; nothing has run.
            RequestFailed, EngineDead: the engine failed; all requests are aborted.
        """
        bar = ProgressBar() if shows_progress else None
        return self._generate(_listed(prompts), sampling_params, bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate outputs for one conversation or several, rendered by the model's chat template.
        Arguments and errors are those of ``generate``; messages have the form of the server's.

        Raises:
            InvalidRequest: also if a message has another form, or the template rejects it.
        """
        conversations: Sequence[Any] = messages
        if isinstance(messages, Mapping) or (messages and isinstance(messages[0], Mapping)):
            conversations = [messages]
        for conversation in conversations:
            if isinstance(conversation, str | Mapping):
                raise InvalidRequest(
                    "messages must be a list of messages, each a dict with role and content, or "
                    f"several such lists; found {type(conversation).__name__}",
                    param="messages",
                )
        prompts = [self._chat_prompt(conversation) for conversation in conversations]
        return self._generate(
            list(prompts), sampling_params, ProgressBar() if shows_progress else None
        )

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while requests use blocks."""
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Close the engine. Idempotent."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _chat_prompt(self, conversation: Sequence[Message]) -> tuple[int, ...]:
        try:
            request = msgspec.convert({"messages": conversation}, ChatRequest)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(str(exc), param="messages") from exc
        return tokenize_chat(request, self.tokenizer, self._engine.info).token_ids

    def _generate(
        self,
        prompts: list[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None,
        bar: ProgressBar | None,
    ) -> list[RequestOutput]:
        running: dict[str, _PromptOutputs] = {}
        try:
            for prompt, given in zip(prompts, _per_prompt(sampling, len(prompts)), strict=True):
                wanted = self._engine.default_sampling if given is None else given
                self._num_prompts += 1
                request_id = f"llm-{self._num_prompts}"
                ids = self._engine.add_request(request_id, prompt, wanted)
                text = prompt if isinstance(prompt, str) else None
                running[request_id] = _PromptOutputs(text, ids, wanted)
            self._finish(running, bar)
        finally:  # also after an error or Ctrl-C
            for request_id in running:
                self._engine.abort_request(request_id)
        return [outputs.output() for outputs in running.values()]

    def _finish(self, running: dict[str, _PromptOutputs], bar: ProgressBar | None) -> None:
        num_finished = 0
        while self._engine.has_unfinished_requests:
            for update in self._engine.step():
                outputs = running[update.request_id]
                num_finished += outputs.add(update)
            if bar is not None:
                bar("generating", num_finished / len(running))


@dataclass(slots=True)
class _PromptOutputs:
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    outputs: list[ChoiceOutput] = field(init=False)
    num_finished: int = field(default=0)

    def __post_init__(self) -> None:
        self.outputs = [ChoiceOutput() for _ in range(self.sampling.num_candidates)]

    def add(self, update: OutputUpdate) -> bool:
        """Add an update; returns whether it was the prompt's last."""
        if update.error is not None:
            raise update.error
        self.outputs[update.index].add(update.update)
        self.num_finished += update.update.finish is not None
        return self.num_finished == len(self.outputs)

    def output(self) -> RequestOutput:
        first = self.outputs[0]
        best = best_choices(self.outputs, self.sampling)
        return RequestOutput(
            self.prompt,
            self.prompt_token_ids,
            tuple(_completion(index, output) for index, output in enumerate(best)),
            first.num_cached_tokens,
            tuple(first.prompt_logprobs),
        )


def _engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    speculation = given.get("speculative_config")
    if isinstance(speculation, Mapping):
        found = _field_values(SpeculativeConfig, speculation)
        if "method" not in found:
            raise ConfigError(f"speculative_config {dict(speculation)} has no method")
        given = {**given, "speculative_config": SpeculativeConfig(**found)}
    with engine_errors():
        return _field_values(EngineConfig, given)


def _field_values(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, which may be given as on the command line.

    Raises:
        ConfigError: there is no such option, or it has no such value.
    """
    options = options_of(config)
    by_name = {name: option for option in options for name in option.names}
    by_field = {option.field: option for option in options}
    names = {each.name for each in fields(config)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        option = by_field.get(name) or by_name.get(name)
        if name in names:
            if option is not None and isinstance(value, str):
                value = _read(option, name, value)
            values[name] = value
        elif option is not None:
            values[option.field] = _read(option, name, value)
        elif value is False and (negative := by_name.get(f"no_{name}")) is not None:
            values[negative.field] = _read(negative, name, True)
        elif (words := vllm_words(name, value)) is None:
            raise ConfigError(f"{name} is no option of {config.__name__}")
        else:
            without_vllm_flags(words)
    return values


def _read(option: Option, name: str, value: Any) -> Any:
    """An option's value as its field has it."""
    if isinstance(value, str) and (option.is_switch or value not in (option.choices or (value,))):
        wanted = list(option.choices) or "True or False"
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")
    try:
        if isinstance(value, str):
            if name.endswith("_bytes"):  # whatever the unit of its flag
                return byte_count(value)
            value = option.parse(value)
            value = [value] if option.nargs or option.is_repeated else value
        return value if option.to_field is None else option.to_field(value)
    except (ValueError, TypeError, AttributeError, ArgumentTypeError) as exc:
        raise ConfigError(f"{name} can't be {value!r}: {exc}") from exc


def _completion(index: int, output: ChoiceOutput) -> CompletionOutput:
    assert output.finish is not None
    return CompletionOutput(
        index=index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(output.logprobs),
        finish_reason=output.finish,
        stop_reason=output.stop_reason,
    )


def _listed(prompts: Any) -> list[str | Sequence[int]]:
    """The prompts as a list. Dicts are iterable, too: their keys are no prompts.

    Raises:
        InvalidRequest: a prompt is neither a text nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts) if _is_list(prompts) else [prompts]
    for found in listed:
        if not _is_list(found) and not isinstance(found, str):
            raise InvalidRequest(
                "prompts must be a text, several texts, or lists of token ids; found "
                f"{type(found).__name__}",
                param="prompt",
            )
    return listed


def _is_list(found: Any) -> bool:
    return isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping)


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams | None] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    if not isinstance(sampling, Sequence):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts need one sampling_params or as many, got {len(sampling)}",
            param="sampling_params",
        )
    return sampling
