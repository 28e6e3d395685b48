"""The state of one client request in the server: prompts, choices, response options and timing.

``InputProcessor`` creates a ``RequestContext``; handler, response builders, metrics and tracing
read it.
"""

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
    """A prompt that choices continue.

    Args:
        token_ids: the tokens that the model receives.
        text: the prompt's text; None where the client sent token ids and wants no echo.
        offsets: for each token, the number of characters before it; empty unless an echo shows log
            probabilities.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A phase of a request; times are in seconds of ``time.monotonic``."""

    name: str
    start: float
    end: float

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return self.end - self.start


class ChoiceStats:
    """Token counts and times of one choice, which starts when this is created.

    Its first token, for ``first_token_at`` and the gaps behind it, is the first that this instance
    computed: a peer's may be reported before the KV behind which this one goes on has arrived.

    Args:
        num_prompt_tokens: the length of the prompt that the engine receives.
    """

    __slots__ = (
        "finish",
        "first_token_at",
        "last_token_at",
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
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_gaps = 0
        self.num_late_gaps = 0
        self.finish: FinishReason | None = None
        self.times: RequestTimes | None = None

    def advance(self, update: TextUpdate, now: float) -> float | None:
        """Process an update received at ``now``. Returns the seconds since the previous token; None
        up to the first token, and for an update without tokens."""
        self.finish = update.finish
        self.times = update.times or self.times
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if not update.token_ids:
            return None
        self.num_tokens += len(update.token_ids)
        last, self.last_token_at = self.last_token_at, now
        if self.first_token_at is None:
            self.first_token_at = now if self.num_computed_tokens else None
            return None
        return None if last is None else now - last

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens that this instance computed: all but a peer's first one."""
        has_peer_token = self.times is not None and self.times.has_peer_token
        return max(0, self.num_tokens - has_peer_token)

    def phases(self) -> list[RequestPhase]:
        """The phases so far: ``queue`` (waiting to be scheduled), ``kv_transfer`` (loading KV from
        a peer or the KVCache pool), ``prefill`` (computing the prompt) and ``decode`` (tokens after
        the first one)."""
        times = self.times
        if times is None:
            return []
        phases = []
        if times.load_started_at is not None:
            phases.append(RequestPhase("queue", times.arrived_at, times.load_started_at))
            if times.loaded_at is not None:
                phases.append(RequestPhase("kv_transfer", times.load_started_at, times.loaded_at))
        elif times.scheduled_at is not None:
            phases.append(RequestPhase("queue", times.arrived_at, times.scheduled_at))
        if times.scheduled_at is None or self.last_token_at is None:
            return phases
        if times.has_peer_token or self.first_token_at is None:
            return [*phases, RequestPhase("decode", times.scheduled_at, self.last_token_at)]
        phases.append(RequestPhase("prefill", times.scheduled_at, self.first_token_at))
        if self.num_tokens > 1:
            phases.append(RequestPhase("decode", self.first_token_at, self.last_token_at))
        return phases


@dataclass(slots=True)
class GeneratedChoice:
    """One choice of a request, with its engine request and its output.

    Args:
        index: the choice's index in the response.
        prompt: the prompt that it continues.
        request: the request that the engine receives.
        output: the output so far.
    """

    index: int
    prompt: Prompt
    request: EngineRequest
    output: ChoiceOutput = field(default_factory=ChoiceOutput)
    stats: ChoiceStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = ChoiceStats(len(self.request.prompt_token_ids))


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One client request: what to generate for it, and how to respond.

    Args:
        request_id: the client's ``X-Request-Id``, or a generated id.
        created: Unix time in seconds.
        model: the model's served name.
        prompts: the prompts, in the request's order.
        choices: the choices to generate, prompt after prompt; the same number for each prompt.
        sampling: the sampling parameters of all choices, as the client sent them.
        kv_transfer: the KV that is received from or sent to another instance.
        generated: the answer's first tokens, which another instance has generated and the client
            has received; the stream continues behind them.
        is_streamed: whether the response is a stream of events.
        includes_usage: whether the stream ends with the token counts.
        has_usage_in_chunks: whether every chunk has the token counts of its choice so far.
        returns_token_ids: whether responses have token ids beside the text.
        names_tokens_by_id: whether log probabilities name tokens by their ids.
        echoes: whether every choice starts with its prompt.
        is_chat: whether this is a chat completion.
        is_prompt_only: whether the client wants information on its prompt only, and no new token.
        shows_prompt_logprobs: whether responses have ``prompt_logprobs``.
        tool_format: the name of the format in which the model calls tools; None if no tools are
            offered.
        tool_schemas: the JSON schemas of the tools' parameters.
        is_one_call: whether an answer may call at most one tool.
        reasoning: whether the prompt leaves the model inside, before or after its reasoning; None
            where answers are not parsed for reasoning.
        shows_reasoning: whether responses show the reasoning.
        trace_parent: W3C ``traceparent`` of the caller's span.
    """

    request_id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    choices: tuple[GeneratedChoice, ...]
    sampling: SamplingParams
    kv_transfer: KVTransferRequest = field(default_factory=KVTransferRequest)
    generated: tuple[int, ...] = ()
    is_streamed: bool = False
    includes_usage: bool = False
    has_usage_in_chunks: bool = False
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
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
        """Note the address from which the request came: its metaserver is expected there."""
        for choice in self.choices:
            transfer = choice.request.kv_transfer_params
            if transfer.metaserver is not None:
                sent = replace(transfer, requester=host)
                choice.request = replace(choice.request, kv_transfer_params=sent)

    @property
    def operation(self) -> str:
        """OpenTelemetry's name of the operation."""
        return "chat" if self.is_chat else "text_completion"

    @property
    def choices_by_prompt(self) -> list[tuple[GeneratedChoice, ...]]:
        """The choices of each prompt: ``n`` of them, or ``best_of`` if that is larger."""
        size = len(self.choices) // len(self.prompts)
        return [self.choices[start : start + size] for start in range(0, len(self.choices), size)]

    def shown_choices(self) -> Sequence[GeneratedChoice]:
        """The choices of a complete response: the best ``n`` of each prompt, renumbered."""
        if not self.sampling.is_ranked:
            return self.choices
        shown: list[GeneratedChoice] = []
        for prompt, group in zip(self.prompts, self.choices_by_prompt, strict=True):
            for output in best_choices([choice.output for choice in group], self.sampling):
                shown.append(GeneratedChoice(len(shown), prompt, group[0].request, output))
        return shown

    def make_parser(self) -> OutputParser | None:
        """A parser for reasoning and tool calls in one choice; None if neither can occur."""
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
        """Cached prompt tokens, summed over the first choice of each prompt. The other choices
        don't count, as they always find the whole prompt cached."""
        return sum(group[0].output.num_cached_tokens for group in self.choices_by_prompt)

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` of all choices; a prompt counts once, however many continue it."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_new_tokens = sum(len(choice.output.token_ids) for choice in self.choices)
        return self._usage(num_prompt_tokens, num_new_tokens, self.num_cached_tokens)

    def usage_of(self, choice: GeneratedChoice) -> dict[str, Any]:
        """The ``usage`` in a chunk of a choice, as in vLLM: of its prompt, and of its own tokens so
        far."""
        size = len(self.choices) // len(self.prompts)
        first = self.choices[choice.index - choice.index % size]
        return self._usage(
            len(choice.prompt.token_ids),
            len(choice.output.token_ids),
            first.output.num_cached_tokens,
        )

    def _usage(
        self, num_prompt_tokens: int, num_new_tokens: int, num_cached_tokens: int
    ) -> dict[str, Any]:
        if self.kv_transfer.num_cached_tokens is not None:
            num_cached_tokens = self.kv_transfer.num_cached_tokens
        num_completion_tokens = len(self.generated) + num_new_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            # those of ``generated`` may be cached, too
            "prompt_tokens_details": {"cached_tokens": min(num_cached_tokens, num_prompt_tokens)},
        }
