"""One client request on its way through the server: prompts, choices, response options, timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mooncake_engine.messages import EngineRequest, FinishReason, RequestTimes
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.server.kv_transfer_requests import KVTransferRequest
from mooncake_engine.text.completion_output import ChoiceOutput, TextUpdate, best_choices
from mooncake_engine.text.reasoning import OutputParser, ReasoningParser, ReasoningState
from mooncake_engine.text.tool_call_forms import PARSERS
from mooncake_engine.text.tool_call_parsers import FirstCallParser, Schemas


@dataclass(frozen=True, slots=True)
class Prompt:
    """What choices continue.

    Args:
        token_ids: as the model gets them.
        text: None where the client sent token ids and does not want them echoed.
        offsets: per token, how many characters precede it; only where an echo shows log
            probabilities.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A part of a request's time, in seconds of a clock like ``time.monotonic``."""

    name: str
    start: float
    end: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end - self.start


class ChoiceStats:
    """Token counts and times of one choice, from now on.

    Args:
        num_prompt_tokens: of its prompt.
    """

    __slots__ = (
        "finish",
        "first_token",
        "last_token",
        "num_cached_tokens",
        "num_gaps",
        "num_late_gaps",
        "num_prompt_tokens",
        "num_tokens",
        "started",
        "times",
    )

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.num_gaps = 0
        self.num_late_gaps = 0
        self.finish: FinishReason | None = None
        self.times: RequestTimes | None = None

    def advance(self, update: TextUpdate, now: float) -> float | None:
        """Take in an update that came at ``now``. Returns seconds since the last token; None for
        the first one, and for an update without tokens."""
        self.finish = update.finish
        self.times = update.times or self.times
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if not update.token_ids:
            return None
        gap = None if self.last_token is None else now - self.last_token
        self.first_token = self.first_token or now
        self.last_token = now
        self.num_tokens += len(update.token_ids)
        return gap

    def phases(self) -> list[RequestPhase]:
        """How the time was spent so far: ``queue`` (waiting to be scheduled), ``kv_transfer``
        (loading a peer's KV), ``prefill`` (computing the prompt) and ``decode`` (tokens after the
        first one)."""
        times = self.times
        if times is None:
            return []
        phases = []
        if times.load_started is not None:
            phases.append(RequestPhase("queue", times.arrived, times.load_started))
            if times.loaded is not None:
                phases.append(RequestPhase("kv_transfer", times.load_started, times.loaded))
        elif times.scheduled is not None:
            phases.append(RequestPhase("queue", times.arrived, times.scheduled))
        if times.scheduled is None or self.first_token is None or self.last_token is None:
            return phases
        if times.loaded is not None:  # the peer sampled the first token
            return [*phases, RequestPhase("decode", times.scheduled, self.last_token)]
        phases.append(RequestPhase("prefill", times.scheduled, self.first_token))
        if self.num_tokens > 1:
            phases.append(RequestPhase("decode", self.first_token, self.last_token))
        return phases


@dataclass(slots=True)
class GeneratedChoice:
    """One choice of a request, from what the engine gets to what came of it.

    Args:
        index: in the response.
        prompt: what it continues.
        request: what the engine gets.
        output: what it has generated so far.
    """

    index: int
    prompt: Prompt
    request: EngineRequest
    output: ChoiceOutput = field(default_factory=ChoiceOutput)
    stats: ChoiceStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = ChoiceStats(len(self.prompt.token_ids))


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One client request: what is generated for it, and how it is answered.

    Args:
        request_id: the client's ``X-Request-Id``, or ours.
        created: Unix time in seconds.
        model: name as served.
        prompts: in the request's order.
        choices: what is generated, prompt after prompt; equally many for each prompt.
        sampling: of all of them, as the client asked for it.
        kv_transfer: KV that comes from or goes to another instance.
        is_streamed: the response is a stream of events.
        includes_usage: the stream ends with the token counts.
        has_usage_in_chunks: every chunk has the token counts so far.
        returns_token_ids: token ids go with the text.
        echoes: every choice begins with its prompt.
        is_chat: a chat completion.
        is_prompt_only: the client wants to know about its prompt, and gets no new token.
        shows_prompt_logprobs: log probabilities of the prompt are an entry of their own.
        tool_format: name of the format in which the model calls tools; None if none are offered.
        tool_schemas: the JSON schemas of their parameters.
        is_one_call: an answer calls one tool at most.
        reasoning: where the prompt leaves a model that may reason; None where none is looked for.
        shows_reasoning: the client wants to see it.
        trace_parent: W3C ``traceparent`` of the caller's span.
    """

    request_id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    choices: tuple[GeneratedChoice, ...]
    sampling: SamplingParams
    kv_transfer: KVTransferRequest = field(default_factory=KVTransferRequest)
    is_streamed: bool = False
    includes_usage: bool = False
    has_usage_in_chunks: bool = False
    returns_token_ids: bool = False
    echoes: bool = False
    is_chat: bool = False
    is_prompt_only: bool = False
    shows_prompt_logprobs: bool = False
    tool_format: str | None = None
    tool_schemas: Schemas = field(default_factory=dict)
    is_one_call: bool = False
    reasoning: ReasoningState | None = None
    shows_reasoning: bool = True
    trace_parent: str | None = None

    def note_sender(self, host: str | None) -> None:
        """The address that it came from, where its metaserver is expected."""
        for choice in self.choices:
            transfer = choice.request.kv_transfer_params
            if transfer.metaserver is not None:
                sent = replace(transfer, requester=host)
                choice.request = replace(choice.request, kv_transfer_params=sent)

    @property
    def operation(self) -> str:
        """OpenTelemetry's name for what is asked."""
        return "chat" if self.is_chat else "text_completion"

    @property
    def choices_by_prompt(self) -> list[tuple[GeneratedChoice, ...]]:
        """The choices of each prompt: ``n``, or ``best_of`` where these are generated."""
        size = len(self.choices) // len(self.prompts)
        return [self.choices[start : start + size] for start in range(0, len(self.choices), size)]

    def shown_choices(self) -> Sequence[GeneratedChoice]:
        """The choices of a complete response: the best ``n`` of each prompt, numbered anew."""
        if not self.sampling.is_ranked:
            return self.choices
        shown: list[GeneratedChoice] = []
        for prompt, group in zip(self.prompts, self.choices_by_prompt, strict=True):
            for output in best_choices([choice.output for choice in group], self.sampling):
                shown.append(GeneratedChoice(len(shown), prompt, group[0].request, output))
        return shown

    def make_parser(self) -> OutputParser | None:
        """Finds reasoning and tool calls in one choice."""
        tools = self._tool_parser()
        if self.reasoning in (None, ReasoningState.CLOSED):
            return tools
        return ReasoningParser(is_open=self.reasoning is ReasoningState.OPEN, rest=tools)

    def _tool_parser(self) -> OutputParser | None:
        if self.tool_format is None:
            return None
        parser = PARSERS[self.tool_format](self.tool_schemas)
        return FirstCallParser(parser) if self.is_one_call else parser

    @property
    def wants_logprobs(self) -> bool:
        """Whether choices show log probabilities."""
        return self.sampling.logprobs is not None

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of each prompt's first choice: those beside it find the whole prompt
        cached."""
        return sum(group[0].output.num_cached_tokens for group in self.choices_by_prompt)

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` so far; a prompt counts once, however many choices continue it."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_completion_tokens = sum(len(choice.output.token_ids) for choice in self.choices)
        num_cached_tokens = self.kv_transfer.num_cached_tokens
        if num_cached_tokens is None:
            num_cached_tokens = self.num_cached_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }
