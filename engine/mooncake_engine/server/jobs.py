"""A client's request, understood: what to generate, and how to answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mooncake_engine.messages import EngineRequest, FinishReason, TokenLogprobs
from mooncake_engine.server.handover import Handover
from mooncake_engine.server.prompts import Prompt
from mooncake_engine.text.generation import TextUpdate


@dataclass(frozen=True, slots=True)
class Job:
    """One client request. Answer ``i`` continues prompt ``i // n`` and is ``requests[i]``.

    Args:
        request_id: the client's.
        created: Unix time in seconds.
        model: as served.
        prompts: what the answers continue.
        requests: one per answer.
        handover: what comes from or goes to another instance.
        is_streamed, includes_usage: the form of the answer.
        returns_token_ids: token ids go with the text.
        echo: texts that the answers begin with, one per prompt; empty for none.
    """

    request_id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    requests: tuple[EngineRequest, ...]
    handover: Handover = field(default_factory=Handover)
    is_streamed: bool = False
    includes_usage: bool = False
    returns_token_ids: bool = False
    echo: tuple[str, ...] = ()

    @property
    def answers_per_prompt(self) -> int:
        """``n``."""
        return len(self.requests) // len(self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of answer ``index``."""
        return self.prompts[index // self.answers_per_prompt]

    def echo_of(self, index: int) -> str:
        """What the text of answer ``index`` begins with."""
        return self.echo[index // self.answers_per_prompt] if self.echo else ""

    def wants_logprobs(self, index: int) -> bool:
        """Whether answer ``index`` shows log probabilities."""
        return self.requests[index].sampling.logprobs is not None


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def add(self, update: TextUpdate) -> None:
        """Take an update in."""
        self.texts.append(update.text)
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs)
        self.text_offsets.extend(update.text_offsets)
        self.finish = update.finish
        self.stop_reason = update.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        self.kv_transfer_params = update.kv_transfer_params


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
