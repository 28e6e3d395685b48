"""A client's request, understood: what to generate, and how to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.server.handover import Handover
from mooncake_engine.server.prompts import Prompt
from mooncake_engine.text.answers import Answer, best_answers
from mooncake_engine.text.tool_calls import Schemas, ToolCallParser
from mooncake_engine.text.tool_forms import PARSERS


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with.

    Args:
        text: of the prompt.
        first_token_id: of the prompt; it has no log probability.
        offsets: per token of the prompt, how many characters precede it; empty unless log
            probabilities are shown.
    """

    text: str
    first_token_id: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One client request. Answer ``i`` continues prompt ``i // answers_per_prompt`` and is
    ``requests[i]``.

    Args:
        request_id: the client's.
        created: Unix time in seconds.
        model: as served.
        prompts: what the answers continue.
        requests: one per answer.
        sampling: of all of them, as the client asked for it.
        handover: what comes from or goes to another instance.
        is_streamed, includes_usage, tells_usage: the form of the answer; the last one is whether
            every chunk says how many tokens there are so far.
        returns_token_ids: token ids go with the text.
        echo: what the answers begin with, one per prompt; empty for none.
        is_chat: asked for as a conversation.
        is_prompt_only: the client wants to know about its prompt, and gets no new token.
        shows_prompt_logprobs: log probabilities of the prompt are an entry of their own.
        tool_format: name of the form in which the model calls tools; None if none are offered.
        tool_schemas: the JSON schemas of their parameters.
        trace_parent: W3C ``traceparent`` of the caller's span.
    """

    request_id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    requests: tuple[EngineRequest, ...]
    sampling: SamplingParams
    handover: Handover = field(default_factory=Handover)
    is_streamed: bool = False
    includes_usage: bool = False
    tells_usage: bool = False
    returns_token_ids: bool = False
    echo: tuple[Echo, ...] = ()
    is_chat: bool = False
    is_prompt_only: bool = False
    shows_prompt_logprobs: bool = False
    tool_format: str | None = None
    tool_schemas: Schemas = field(default_factory=dict)
    trace_parent: str | None = None

    @property
    def operation(self) -> str:
        """OpenTelemetry's name for what is asked."""
        return "chat" if self.is_chat else "text_completion"

    @property
    def answers_per_prompt(self) -> int:
        """``n``, or ``best_of`` while they are generated."""
        return len(self.requests) // len(self.prompts)

    def best(self, answers: Sequence[Answer]) -> tuple[Job, list[Answer]]:
        """The answers that the client is shown, and the job as if no others had been generated."""
        if not self.sampling.is_ranked:
            return self, list(answers)
        size, shown = self.answers_per_prompt, range(self.sampling.n)
        starts = range(0, len(answers), size)
        best = [best_answers(answers[start : start + size], self.sampling) for start in starts]
        requests = [self.requests[start + index] for start in starts for index in shown]
        return replace(self, requests=tuple(requests)), [a for group in best for a in group]

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of answer ``index``."""
        return self.prompts[index // self.answers_per_prompt]

    def echo_of(self, index: int) -> Echo | None:
        """What answer ``index`` begins with."""
        return self.echo[index // self.answers_per_prompt] if self.echo else None

    def make_parser(self) -> ToolCallParser | None:
        """Finds the tool calls in one answer."""
        return PARSERS[self.tool_format](self.tool_schemas) if self.tool_format else None

    @property
    def wants_logprobs(self) -> bool:
        """Whether answers show log probabilities."""
        return self.sampling.logprobs is not None


def usage(job: Job, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """OpenAI's ``usage``; a prompt counts once, however many answers continue it."""
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    if job.handover.num_cached_tokens is not None:
        num_cached_tokens = job.handover.num_cached_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
