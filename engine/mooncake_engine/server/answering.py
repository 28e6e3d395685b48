"""Runs a job and answers it: whole, or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mooncake_engine.errors import EngineError
from mooncake_engine.messages import FinishReason, KVTransferParams, TokenLogprobs, TokenUpdate
from mooncake_engine.server.clock import RequestClock
from mooncake_engine.server.forms import DONE, ChunkFrame, Form, chunk, sse
from mooncake_engine.server.handover import handover_params
from mooncake_engine.server.jobs import Job, usage
from mooncake_engine.server.metrics import ServerMetrics
from mooncake_engine.server.streams import merge
from mooncake_engine.server.tracing import Tracing
from mooncake_engine.text.answers import Answer
from mooncake_engine.text.generation import (
    AnswerText,
    Engine,
    TextUpdate,
    generate_text,
    without_shown,
)
from mooncake_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answerer:
    """Generates answers with one engine.

    Args:
        engine, tokenizer: what answers come from.
        metrics: what is counted of them.
        tracing: where their spans go; None for nowhere.
    """

    engine: Engine
    tokenizer: Tokenizer
    metrics: ServerMetrics
    tracing: Tracing | None = None

    async def whole(self, job: Job, form: Form) -> bytes:
        """The answer's body.

        Raises:
            EngineError: what ``generate_text`` raises; every answer of the job is aborted.
        """
        answers = [Answer() for _ in job.requests]
        with self._handing_over(answers):
            async with aclosing(self._updates(job)) as updates:
                async for index, update in updates:
                    answers[index].add(update)
        shown, best = job.best(answers)
        body: dict[str, Any] = {
            "id": form.api_id(job),
            "object": form.object_name,
            "created": job.created,
            "model": job.model,
            "choices": [form.choice(shown, i, answer) for i, answer in enumerate(best)],
            "usage": _total_usage(job, answers),
            **form.beside_choices(shown, best),
        }
        if job.handover.is_outgoing:
            body["kv_transfer_params"] = self._handover_params(job, answers)
        return msgspec.json.encode(body)

    @contextmanager
    def _handing_over(self, answers: Sequence[Answer]) -> Iterator[None]:
        """What is kept for a peer is given up if the client leaves, or another answer fails, before
        anybody has heard of it."""
        try:
            yield
        except BaseException:
            for answer in answers:
                if answer.kv_transfer_params is not None:
                    self.engine.abort(answer.kv_transfer_params["remote_request_id"])
            raise

    async def streamed(self, job: Job, form: Form) -> AsyncGenerator[bytes, None]:
        """The answer's events. The first one comes when the engine has answered, so that errors
        before it can still have a status of their own; raises like ``whole``."""
        writer = _EventWriter(job, form)
        async with aclosing(self._updates(job)) as updates:
            async for index, update in updates:
                events = writer.write(index, update)
                if events:
                    yield events
        yield writer.closing()

    async def _updates(self, job: Job) -> AsyncGenerator[tuple[int, TextUpdate], None]:
        clocks = [RequestClock(len(request.prompt_token_ids)) for request in job.requests]
        streams = [self._answer(job, index) for index in range(len(job.requests))]
        outcome = FinishReason.ABORT  # of the answers that have not ended by themselves
        try:
            async with aclosing(merge(streams)) as merged:
                async for index, update in merged:
                    self.metrics.advance(clocks[index], update, time.monotonic())
                    yield index, _without_answer(update) if job.is_prompt_only else update
        except EngineError:
            outcome = FinishReason.ERROR
            raise
        finally:
            self.metrics.end(job, clocks, time.monotonic(), outcome)
            if self.tracing is not None:
                self.tracing.record(job, clocks, outcome)

    def _answer(self, job: Job, index: int) -> AsyncGenerator[TextUpdate, None]:
        request = job.requests[index]
        finished = job.handover.finished_update(index)
        if finished is not None:
            return self._replayed(job, index, finished)
        return generate_text(
            self.engine,
            self.tokenizer,
            request,
            parser=job.make_parser(),
            is_first_delivered=job.handover.is_first_delivered,
        )

    async def _replayed(
        self, job: Job, index: int, finished: TokenUpdate
    ) -> AsyncGenerator[TextUpdate, None]:
        """An answer that ended at the prefill instance with its first token."""
        sampling = job.requests[index].sampling
        update = AnswerText(self.tokenizer, sampling, job.make_parser()).advance(finished)
        yield without_shown(update) if job.handover.is_first_delivered else update

    def _handover_params(self, job: Job, answers: list[Answer]) -> KVTransferParams | None:
        facts = {
            "created": job.created,
            "remote_cached_tokens": _cached_tokens(job, answers),
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
        }
        return handover_params(
            [
                _finished_update(job.requests[index].request_id, answer)
                if answer.kv_transfer_params is None
                else answer.kv_transfer_params
                for index, answer in enumerate(answers)
            ],
            facts,
        )


class _EventWriter:
    """Encodes one job's updates as events."""

    def __init__(self, job: Job, form: Form) -> None:
        self._job = job
        self._form = form
        self._frames = [ChunkFrame(form, job, i) for i in range(len(job.requests))]
        self._answers = [Answer() for _ in job.requests]
        self._is_opened = [False] * len(job.requests)

    def write(self, index: int, update: TextUpdate) -> bytes:
        """The events of one update; empty while nothing is certain."""
        answer = self._answers[index]
        answer.token_ids.extend(update.token_ids)
        answer.num_cached_tokens = max(answer.num_cached_tokens, update.num_cached_tokens)
        answer.prompt_logprobs.extend(update.prompt_logprobs)
        if update.prompt_logprobs and update.finish is None:
            return b""  # more of the prompt follows, or the first token
        if self._is_opened[index]:
            return self._delta(index, update, is_first=False)
        self._is_opened[index] = True
        update = replace(update, prompt_logprobs=tuple(answer.prompt_logprobs))
        return self._open(index) + self._delta(index, update, is_first=True)

    def _delta(self, index: int, update: TextUpdate, *, is_first: bool) -> bytes:
        job = self._job
        is_first = is_first and not job.handover.is_first_delivered
        shows_ids = job.returns_token_ids and update.token_ids
        has_details = update.logprobs or update.calls or shows_ids
        is_counted = job.tells_usage and update.text
        if update.finish is not None or has_details or is_counted or (is_first and job.echo):
            return self._chunk(self._form.delta(job, index, update, is_first=is_first))
        return self._frames[index].encode(update.text) if update.text else b""

    def closing(self) -> bytes:
        """The events after the last update."""
        if not self._job.includes_usage:
            return DONE
        total = _total_usage(self._job, self._answers)
        return sse(chunk(self._form, self._job, [], usage=total)) + DONE

    def _open(self, index: int) -> bytes:
        job = self._job
        choice = self._form.opening(job, index)
        if choice is None and not job.returns_token_ids:
            return b""
        choice = choice or self._form.plain_delta(index, "")
        if job.returns_token_ids:
            choice["prompt_token_ids"] = job.prompt_of(index).token_ids
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        job = self._job
        so_far = {"usage": _total_usage(job, self._answers)} if job.tells_usage else {}
        return sse(chunk(self._form, job, [choice], **so_far))


def _without_answer(update: TextUpdate) -> TextUpdate:
    """What is left where no token was asked for."""
    return TextUpdate(
        "",
        finish=update.finish and FinishReason.LENGTH,
        num_cached_tokens=update.num_cached_tokens,
        prompt_logprobs=update.prompt_logprobs,
    )


def _finished_update(request_id: str, answer: Answer) -> TokenUpdate:
    """An answer that is complete with its first token, in words that a peer can replay."""
    ends_with_token = answer.finish is FinishReason.STOP and not isinstance(answer.stop_reason, str)
    logprobs: tuple[TokenLogprobs, ...] | None = tuple(answer.logprobs) or None
    return TokenUpdate(
        request_id,
        tuple(answer.token_ids),
        logprobs,
        finish=answer.finish or FinishReason.STOP,
        stop_token_id=answer.token_ids[-1] if ends_with_token else None,
        num_cached_tokens=answer.num_cached_tokens,
    )


def _total_usage(job: Job, answers: list[Answer]) -> dict[str, Any]:
    num_completion_tokens = sum(len(answer.token_ids) for answer in answers)
    return usage(job, num_completion_tokens, _cached_tokens(job, answers))


def _cached_tokens(job: Job, answers: list[Answer]) -> int:
    """Of each prompt's first answer: those beside it find the whole prompt cached."""
    return sum(answer.num_cached_tokens for answer in answers[:: job.answers_per_prompt])
