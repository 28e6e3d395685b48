"""One answer as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_engine.messages import FinishReason, KVTransferParams, TokenLogprobs
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.generation import TextUpdate
from mooncake_engine.text.tool_calls import CallDelta


@dataclass(slots=True)
class Answer:
    """All updates of one answer together; the fields are those of ``TextUpdate``."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    ends_with_calls: bool = False

    @property
    def cumulative_logprob(self) -> float:
        """Of all its tokens together."""
        return sum(entry.logprob for entry in self.logprobs)

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
        self.prompt_logprobs.extend(update.prompt_logprobs)
        self.calls.extend(update.calls)
        self.ends_with_calls = update.ends_with_calls


def best_answers(candidates: Sequence[Answer], sampling: SamplingParams) -> list[Answer]:
    """The ``n`` most probable of a prompt's answers, the best first; all, as they are, where no
    more were generated. Log probabilities that only served the ranking are dropped."""
    if not sampling.is_ranked:
        return list(candidates)
    ranked = sorted(candidates, key=lambda answer: answer.cumulative_logprob, reverse=True)
    best = ranked[: sampling.n]
    if sampling.logprobs is None:
        for answer in best:
            answer.logprobs = []
    return best
