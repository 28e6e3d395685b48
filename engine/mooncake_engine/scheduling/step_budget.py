"""How many tokens a step may have, and when prompts may start: the bounds that keep decodes going.

Decodes run in every step (as with Sarathi-Serve and vLLM v1). Prompts share what is left, in chunks
that are neither crumbs nor larger than asked for; beside decodes they share what a bound on the
step leaves: a number of tokens, or what measured steps say fits into a time between tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import StepPlan

_NEWEST = 0.25
"""Weight of the newest step in a running mean: what a minute ago has cost no longer counts."""


_CHUNKS_BELOW_TARGET = 4
"""A target may cut the smallest chunk in so many: at the end of a long prompt a token costs a
multiple of one at its beginning, and the smallest chunk that suits this one breaks the target."""


class StepTimes:
    """What steps take: a step of decodes, and each prompt token beside them.

    Args:
        first_tokens: prompt tokens beside decodes before any step has told what they take.
    """

    def __init__(self, first_tokens: int) -> None:
        self._most_tokens = first_tokens
        self._decodes_s: float | None = None
        self._token_s: float | None = None
        self._deviation_s: float | None = None  # of steps with both, from what was expected

    def learn(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take in what a step of so many decodes and prompt tokens took."""
        if not num_prompt_tokens:
            self._decodes_s = _mean(self._decodes_s, seconds)
        elif num_decodes:
            if self._token_s is not None:
                expected = (self._decodes_s or 0.0) + self._token_s * num_prompt_tokens
                self._deviation_s = _mean(self._deviation_s, abs(seconds - expected))
            self._token_s = _mean(self._token_s, self._beside_decodes(seconds) / num_prompt_tokens)
            self._most_tokens = max(self._most_tokens, 2 * num_prompt_tokens)
        elif self._token_s is None:  # more than it costs beside decodes: a safe place to begin
            self._token_s = seconds / num_prompt_tokens

    def prompt_tokens_within(self, seconds: float) -> int:
        """How many prompt tokens a step with decodes has time for, with room for two of the mean
        deviations that steps have (as TCP's retransmission timer has room for four): who waits
        for tokens sees the long steps. At most twice as many as were ever tried: a step that
        happened to be short promises little."""
        if self._token_s is None:
            return self._most_tokens
        left = self._beside_decodes(seconds - 2.0 * (self._deviation_s or 0.0))
        room = int(left / max(self._token_s, 1e-9))
        return min(room, self._most_tokens)

    def _beside_decodes(self, seconds: float) -> float:
        return max(seconds - (self._decodes_s or 0.0), 0.0)


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)


class StepBudget:
    """The shares of a step.

    A prompt among the running sequences always gets its smallest chunk: no more sequences run than
    a step has tokens, and the smallest chunk is no more than what decodes in all other places leave
    of it. So no prompt starves.

    Args:
        limits: what was asked for.

    Attributes:
        max_num_seqs: sequences that may run at once.
        min_chunk: tokens of a prompt in a step, unless it has fewer left; with a target for the
            time between tokens a part of what was asked for.
        times: of steps.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        most = limits.max_num_batched_tokens
        self.max_num_seqs = min(limits.max_num_seqs, most)
        smallest = min(limits.min_prefill_chunk, limits.prefill_chunk_size or most)
        if limits.target_tbt_s is not None:
            smallest //= _CHUNKS_BELOW_TARGET
        self.min_chunk = max(1, min(smallest, most - self.max_num_seqs + 1))
        self.times = StepTimes(self.min_chunk)

    def beside_decodes(self, num_decodes: int) -> int:
        """Tokens that prompts and drafts may have in a step with so many decodes."""
        limits = self._limits
        room = limits.max_num_batched_tokens - num_decodes
        if num_decodes and limits.max_step_tokens_with_decodes is not None:
            room = min(room, limits.max_step_tokens_with_decodes - num_decodes)
        if num_decodes and limits.target_tbt_s is not None:
            room = min(room, self.times.prompt_tokens_within(limits.target_tbt_s))
        return max(room, self.min_chunk)

    def chunk(self, request: Request, budget: int) -> int:
        """How many of its pending tokens a prompt gets of ``budget``; 0 where that is a crumb."""
        num_pending = request.num_pending
        count = min(num_pending, budget, self._largest_chunk(request))
        return count if count >= min(num_pending, self.min_chunk) else 0

    def may_begin(self, request: Request, budget: int) -> bool:
        """Whether a prompt that has yet to look for its cached prefix gets a chunk for certain."""
        return budget >= min(request.num_tokens, self.min_chunk)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in what a step took, where that is asked for."""
        if self._limits.target_tbt_s is None or not plan.sequences:
            return
        num_decodes = sum(1 for s in plan.sequences if s.count == 1 and s.is_sampling)
        self.times.learn(num_decodes, plan.num_tokens - num_decodes, seconds)

    def _largest_chunk(self, request: Request) -> int:
        """As asked for; else with pipeline stages as many chunks as stages, so that all of them
        have work."""
        limits = self._limits
        if limits.prefill_chunk_size is not None:
            return limits.prefill_chunk_size
        if limits.num_stages == 1:
            return limits.max_num_batched_tokens
        return max(-(-request.num_tokens // limits.num_stages), self.min_chunk)


class AdmissionDelay:
    """Holds prompts back for a multiple of what the last ones took (vLLM's scheduler delay factor).

    With many prompts coming in, fewer steps are disturbed by prefills, at the cost of time to
    the first token.

    Args:
        factor: 0 never holds back.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_step = 0.0
        self._latency = 0.0
        self._has_prefill = False

    def begin_step(self, now: float) -> None:
        """A step is planned; the one before it is over."""
        if self._has_prefill:
            self._latency = now - self._last_step
        self._last_step, self._has_prefill = now, False

    def note_prefill(self) -> None:
        """The step runs a new prompt."""
        self._has_prefill = True

    def has_passed(self, waiting: Iterable[Request]) -> bool:
        """Whether the prompts that wait may start: judged by the earliest, for all of them
        together, so that one step is disturbed and not one per prompt."""
        if not self._factor:
            return True
        earliest = min((request.arrival for request in waiting), default=self._last_step)
        return self._last_step - earliest > self._factor * self._latency
