"""Offline generation: ``LLM`` over the same engine that serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineRequest, FinishReason, TokenLogprobs
from mooncake_engine.progress import ProgressBar
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.generation import Engine, TextUpdate, generate_text
from mooncake_engine.text.limits import answer_sampling, check_prompt
from mooncake_engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Args:
        index: which of ``n``.
        text, token_ids: the answer, without its stop string; a stop token is among the ids.
        logprobs: one per token, if asked for.
        finish_reason: why it ended.
        stop_reason: the stop string or stop token that ended it, if one was asked for and did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt's answers.

    Args:
        prompt: as text; None where token ids were given.
        prompt_token_ids: as the model saw it.
        outputs: ``n`` answers.
        num_cached_tokens: prompt tokens that needed no computing.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int


class LLM:
    """Generates text with a model from a Hugging Face directory.

    ``with LLM("models/llama") as llm: llm.generate("Once upon a time")``

    Args:
        model: the directory.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError, CheckpointError: the engine can't be set up like that.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._attach(*_load(EngineConfig(model=Path(model), **options)))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An LLM for a complete configuration; raises like the constructor."""
        return cls.from_engine(*_load(config))

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> LLM:
        """An LLM over an engine that has been started, and that it will close."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer)
        return llm

    def _attach(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._num_prompts = 0
        self._loop = asyncio.new_event_loop()
        # Its own thread, because the caller's may run a loop already (notebooks do).
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts, all at once; the outputs are in the prompts' order.

        Args:
            prompts: a text, texts, or lists of token ids.
            sampling_params: for all prompts, or one per prompt.
            shows_progress: draw a bar on standard error.

        Raises:
            InvalidRequest: a prompt or its sampling can't be served; nothing has run.
            RequestFailed, EngineDead: the engine could not finish; every request is aborted.
        """
        listed: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._generate(listed, sampling_params, shows_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, laid out by the model's chat template.

        Raises:
            InvalidRequest: also where the template refuses the messages.
        """
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        texts = [self._tokenizer.render_chat(conversation) for conversation in conversations]
        prompts = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._generate(list(prompts), sampling_params, shows_progress)

    def close(self) -> None:
        """End the engine; idempotent."""
        if self._loop.is_closed():
            return
        self._engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: list[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        shows_progress: bool,
    ) -> list[RequestOutput]:
        jobs = [
            self._job(prompt, wanted)
            for prompt, wanted in zip(prompts, _per_prompt(sampling, len(prompts)), strict=True)
        ]
        return self._run(self._finish_all(jobs, ProgressBar() if shows_progress else None))

    def _job(self, prompt: str | Sequence[int], sampling: SamplingParams) -> _Job:
        text = prompt if isinstance(prompt, str) else None
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        check_prompt(ids, self._engine.facts, param="prompt")
        self._num_prompts += 1
        requests = [
            EngineRequest(
                request_id=f"llm-{self._num_prompts}-{index}",
                prompt_token_ids=ids,
                sampling=answer_sampling(sampling, index, len(ids), self._engine.facts),
            )
            for index in range(sampling.n)
        ]
        return _Job(text, ids, tuple(requests))

    async def _finish_all(self, jobs: list[_Job], bar: ProgressBar | None) -> list[RequestOutput]:
        # As many at a time as the engine queues; more would be refused.
        room = asyncio.Semaphore(self._engine.config.max_queued_requests)
        num_finished = 0

        async def finish(job: _Job) -> RequestOutput:
            nonlocal num_finished
            answers = [_answer(self._stream(request), room) for request in job.requests]
            collected = await _gather(answers)
            num_finished += 1
            if bar is not None:
                bar("generating", num_finished / len(jobs))
            return job.output(collected)

        return await _gather([finish(job) for job in jobs])

    def _stream(self, request: EngineRequest) -> AsyncGenerator[TextUpdate, None]:
        return generate_text(self._engine, self._tokenizer, request)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


def _load(config: EngineConfig) -> tuple[Engine, Tokenizer]:
    from mooncake_engine.async_engine import AsyncEngine

    tokenizer = Tokenizer.load(config.model)
    return AsyncEngine.start(config, ProgressBar()), tokenizer


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    requests: tuple[EngineRequest, ...]

    def output(self, answers: list[list[TextUpdate]]) -> RequestOutput:
        cached = max((update.num_cached_tokens for update in answers[0]), default=0)
        outputs = tuple(_completion(index, updates) for index, updates in enumerate(answers))
        return RequestOutput(self.prompt, self.prompt_token_ids, outputs, cached)


def _completion(index: int, updates: list[TextUpdate]) -> CompletionOutput:
    last = updates[-1]
    assert last.finish is not None
    return CompletionOutput(
        index=index,
        text="".join(update.text for update in updates),
        token_ids=tuple(token_id for update in updates for token_id in update.token_ids),
        logprobs=tuple(entry for update in updates for entry in update.logprobs),
        finish_reason=last.finish,
        stop_reason=last.stop_reason,
    )


async def _answer(
    stream: AsyncGenerator[TextUpdate, None], room: asyncio.Semaphore
) -> list[TextUpdate]:
    async with room, aclosing(stream) as updates:
        return [update async for update in updates]


async def _gather(work: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order; the first error ends the others, and they have ended when it is out."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_prompts
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts need one sampling_params or as many, got {len(sampling)}",
            param="sampling_params",
        )
    return sampling
