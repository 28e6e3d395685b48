"""From a request to a job: every check that needs no engine step happens here."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineFacts, EngineRequest
from mooncake_engine.sampling_params import Grammar, SamplingParams
from mooncake_engine.server.envelope import Envelope
from mooncake_engine.server.handover import Handover, check_same_tokenizer, read_handover
from mooncake_engine.server.jobs import Echo, Job
from mooncake_engine.server.prompts import Prompt, chat_prompt, completion_prompts
from mooncake_engine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from mooncake_engine.server.request_ids import choice_ids
from mooncake_engine.server.sampling import chat_sampling, completion_sampling, is_prompt_only
from mooncake_engine.server.structured import check_grammar, grammar_of, structure_field
from mooncake_engine.server.tools import offered_tools
from mooncake_engine.text.detokenizer import text_offsets
from mooncake_engine.text.limits import answer_sampling
from mooncake_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Planner:
    """Turns requests into jobs for one engine and its tokenizer.

    Args:
        model_names: that the model is served under; answers bear the first one.
        facts: of the engine.
        tokenizer: the model's.
        tool_format: in which the model calls tools; None if it can't.
    """

    model_names: tuple[str, ...]
    facts: EngineFacts
    tokenizer: Tokenizer
    tool_format: str | None = None

    async def completion(self, request: CompletionRequest, envelope: Envelope) -> Job:
        """Raises InvalidRequest for whatever is wrong with it."""
        self.check_model(request.model)
        sampling = completion_sampling(request, self.facts)
        sampling = await self._structured(sampling, grammar_of(request), structure_field(request))
        prompts = await completion_prompts(request, self.tokenizer, self.facts)
        job = self._job(request, envelope, sampling, prompts)
        return replace(
            job,
            echo=await self._echoes(request, prompts) if request.echo else (),
            is_prompt_only=is_prompt_only(request),
        )

    async def chat(self, request: ChatRequest, envelope: Envelope) -> Job:
        """Raises InvalidRequest for whatever is wrong with it."""
        self.check_model(request.model)
        sampling = chat_sampling(request, self.facts)
        structure = grammar_of(request)
        tools = offered_tools(request, self.tool_format, structure)
        field = structure_field(request) if tools.grammar is structure else "tools"
        sampling = await self._structured(sampling, tools.grammar, field)
        prompt = await chat_prompt(request, self.tokenizer, self.facts, tools.shown)
        job = self._job(request, envelope, sampling, [prompt])
        return replace(job, is_chat=True, tool_format=tools.tool_format, tool_schemas=tools.schemas)

    def check_model(self, model: str | None) -> None:
        """Raises InvalidRequest (404) for a model that is not served here."""
        if model is not None and model not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise InvalidRequest(
                f"the model {model!r} is not served here; {served} is",
                param="model",
                status=404,
            )

    async def _structured(
        self, sampling: SamplingParams, grammar: Grammar | None, field: str
    ) -> SamplingParams:
        if grammar is None:
            return sampling
        structured = replace(sampling, grammar=grammar)
        await check_grammar(grammar, field, self.tokenizer, self.facts)
        return structured

    async def _echoes(
        self, request: CompletionRequest, prompts: Sequence[Prompt]
    ) -> tuple[Echo, ...]:
        """On another thread: long prompts take milliseconds."""
        with_offsets = request.logprobs is not None
        return await asyncio.to_thread(
            lambda: tuple(self._echo_of(prompt, with_offsets=with_offsets) for prompt in prompts)
        )

    def _echo_of(self, prompt: Prompt, *, with_offsets: bool) -> Echo:
        ids = prompt.token_ids
        text = self.tokenizer.decode(ids) if prompt.text is None else prompt.text
        return Echo(text, ids[0], text_offsets(self.tokenizer, ids) if with_offsets else ())

    def _job(
        self,
        request: GenerationFields,
        envelope: Envelope,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
    ) -> Job:
        is_streamed, streaming = bool(request.stream), _stream_options(request)
        num_answers = len(prompts) * sampling.num_candidates
        handover = read_handover(request.kv_transfer_params, num_answers, stream=is_streamed)
        check_same_tokenizer(handover, self.tokenizer.fingerprint)
        common = EngineRequest(
            envelope.request_id,
            (),
            sampling,
            priority=request.priority or 0,
            timeout_s=envelope.timeout_s(request.timeout),
        )
        return Job(
            request_id=envelope.request_id,
            created=int(time.time()) if handover.created is None else handover.created,
            model=self.model_names[0],
            prompts=tuple(prompts),
            requests=self._answers(common, prompts, handover),
            sampling=sampling,
            handover=handover,
            is_streamed=is_streamed,
            includes_usage=streaming.include_usage,
            tells_usage=streaming.include_usage and streaming.continuous_usage_stats,
            returns_token_ids=bool(request.return_token_ids),
            shows_prompt_logprobs=request.prompt_logprobs is not None,
            trace_parent=envelope.trace_parent,
        )

    def _answers(
        self, common: EngineRequest, prompts: Sequence[Prompt], handover: Handover
    ) -> tuple[EngineRequest, ...]:
        """A request per answer, prompt after prompt; ``common`` is what they have in common."""
        per_prompt = common.sampling.num_candidates
        names = choice_ids(common.request_id, len(prompts) * per_prompt)
        group = secrets.token_hex(8)  # ids are the clients', and may not be unique
        answers = []
        for i, name in enumerate(names):
            number, index = divmod(i, per_prompt)
            ids = prompts[number].token_ids
            answer = replace(
                common,
                request_id=name,
                prompt_token_ids=ids,
                sampling=answer_sampling(common.sampling, index, len(ids), self.facts),
                kv_transfer_params=handover.params(i),
                group=f"{group}-{number}" if per_prompt > 1 else None,
            )
            answers.append(answer)
        return tuple(answers)


def _stream_options(request: GenerationFields) -> StreamOptions:
    """How a stream is to look; the defaults where nothing is said.

    Raises:
        InvalidRequest: nothing is streamed, or in a way that is not served.
    """
    if request.stream_options is None:
        return StreamOptions()
    if not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.stream_options.include_obfuscation:
        raise InvalidRequest(
            "chunks are not obfuscated here: leave include_obfuscation out or send false",
            param="stream_options.include_obfuscation",
        )
    return request.stream_options
