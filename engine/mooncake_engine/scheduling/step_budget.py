"""Bounds that protect decodes: how many tokens a step may run, and when prompts may start.

Decodes run in every step (as with Sarathi-Serve and vLLM v1). Prompts share the remaining budget,
in chunks between a minimum and a maximum size. In steps with decodes a bound limits the prompts
further: a fixed number of tokens, or as many tokens as fit into a target time between tokens
according to measured steps. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import StepPlan

_NEWEST_WEIGHT = 0.25
"""Weight of the newest step in a running mean, large enough to forget costs of a minute ago."""


_MIN_CHUNK_DIVISOR = 4
"""Divisor of the minimum chunk size if there is a target TBT. A token at the end of a long prompt
costs a multiple of one at its beginning, so a minimum that suits the beginning breaks the target at
the end."""


class StepTimes:
    """Estimates step durations: of a step of decodes, and of each prompt token added to one.

    Args:
        first_tokens: prompt tokens to allow in a step with decodes before any has been measured.
    """

    def __init__(self, first_tokens: int) -> None:
        self._max_tokens = first_tokens
        self._decodes_s: float | None = None
        self._token_s: float | None = None
        self._deviation_s: float | None = None  # of steps with both, from their estimate

    def learn(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Update the estimates with the duration of a step."""
        if not num_prompt_tokens:
            self._decodes_s = _mean(self._decodes_s, seconds)
        elif num_decodes:
            if self._token_s is not None:
                expected = (self._decodes_s or 0.0) + self._token_s * num_prompt_tokens
                self._deviation_s = _mean(self._deviation_s, abs(seconds - expected))
            self._token_s = _mean(self._token_s, self._beside_decodes(seconds) / num_prompt_tokens)
            self._max_tokens = max(self._max_tokens, 2 * num_prompt_tokens)
        elif self._token_s is None:  # costs more than beside decodes: a safe initial estimate
            self._token_s = seconds / num_prompt_tokens

    def prompt_tokens_within(self, seconds: float) -> int:
        """Returns how many prompt tokens fit into a step with decodes of that duration.

        Two mean deviations are kept as a margin (TCP's retransmission timer keeps four), because
        clients that wait for tokens notice the long steps. The result is at most twice the number
        that was ever measured, because a single short step proves little."""
        if self._token_s is None:
            return self._max_tokens
        left = self._beside_decodes(seconds - 2.0 * (self._deviation_s or 0.0))
        num_tokens = int(left / max(self._token_s, 1e-9))
        return min(num_tokens, self._max_tokens)

    def _beside_decodes(self, seconds: float) -> float:
        return max(seconds - (self._decodes_s or 0.0), 0.0)


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST_WEIGHT * (newest - mean)


class StepBudget:
    """Divides the token budget of a step among decodes and prompts.

    No prompt starves: at least one running prompt gets a minimum chunk in each step. For no more
    sequences run than a step has tokens, and the minimum chunk is no larger than the budget that is
    left if all other sequences decode.

    Args:
        limits: the configured limits.

    Attributes:
        max_num_seqs: maximum number of running sequences.
        min_chunk: minimum tokens of a prompt in a step, unless fewer are pending; smaller than the
            configured minimum if there is a target TBT.
        times: estimates of step durations.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        most = limits.max_num_batched_tokens
        self.max_num_seqs = min(limits.max_num_seqs, most)
        smallest = min(limits.min_prefill_chunk, limits.prefill_chunk_size or most)
        if limits.target_tbt_s is not None:
            smallest //= _MIN_CHUNK_DIVISOR
        self.min_chunk = max(1, min(smallest, most - self.max_num_seqs + 1))
        self.times = StepTimes(self.min_chunk)

    def beside_decodes(self, num_decodes: int) -> int:
        """Returns the tokens left to prompts and drafts in a step with that many decodes."""
        limits = self._limits
        num_tokens = limits.max_num_batched_tokens - num_decodes
        if num_decodes and limits.max_step_tokens_with_decodes is not None:
            num_tokens = min(num_tokens, limits.max_step_tokens_with_decodes - num_decodes)
        if num_decodes and limits.target_tbt_s is not None:
            num_tokens = min(num_tokens, self.times.prompt_tokens_within(limits.target_tbt_s))
        return max(num_tokens, self.min_chunk)

    def chunk(self, request: Request, budget: int) -> int:
        """Returns how many pending tokens a prompt gets of ``budget``; 0 if below the minimum."""
        num_pending = request.num_pending
        count = min(num_pending, budget, self._largest_chunk(request))
        return count if count >= min(num_pending, self.min_chunk) else 0

    def may_begin(self, request: Request, budget: int) -> bool:
        """Whether ``budget`` suffices for a chunk of a prompt, whatever its cached prefix is."""
        return budget >= min(request.num_tokens, self.min_chunk)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimates with the duration of a step, if there is a target TBT."""
        if self._limits.target_tbt_s is None or not plan.sequences:
            return
        num_decodes = sum(1 for s in plan.sequences if s.count == 1 and s.is_sampling)
        self.times.learn(num_decodes, plan.num_tokens - num_decodes, seconds)

    def _largest_chunk(self, request: Request) -> int:
        """Returns the configured maximum. By default a pipeline splits a prompt into as many chunks
        as there are stages, so that all stages have work."""
        limits = self._limits
        if limits.prefill_chunk_size is not None:
            return limits.prefill_chunk_size
        if limits.num_stages == 1:
            return limits.max_num_batched_tokens
        return max(-(-request.num_tokens // limits.num_stages), self.min_chunk)


class AdmissionDelay:
    """Delays prompts by a multiple of the last prefill step's duration (vLLM's scheduler delay
    factor).

    If many prompts arrive, prefills then disturb fewer steps, at the cost of TTFT.

    Args:
        factor: multiple of the duration; 0 disables the delay.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_step = 0.0
        self._latency = 0.0
        self._has_prefill = False

    def begin_step(self, now: float) -> None:
        """Record that the scheduler starts to plan a step."""
        if self._has_prefill:
            self._latency = now - self._last_step
        self._last_step, self._has_prefill = now, False

    def note_prefill(self) -> None:
        """Record that the step runs a new prompt."""
        self._has_prefill = True

    def has_passed(self, waiting: Iterable[Request]) -> bool:
        """Whether the waiting prompts may start. The earliest arrival decides for all of them, so
        that they start in one step and don't disturb one step each."""
        if not self._factor:
            return True
        earliest = min((request.arrival for request in waiting), default=self._last_step)
        return self._last_step - earliest > self._factor * self._latency
