"""Schedules draft tokens: how many each sequence gets in a step, and whether drafting pays at all.

The draft length adapts per sequence: it grows by two after a step whose drafts were all accepted,
and shrinks by one otherwise (the heuristic of Hugging Face's assisted generation). If it is down to
one and that draft is rejected, drafting pauses, each time twice as long.

A draft token costs next to nothing in a step that is bound by reading the weights, and as much as a
prompt token in one that is bound by compute. Which of the two a step is depends on the batch, so
steps with and without drafts are measured by batch size, and drafting stops where it yields fewer
tokens per second (after the adaptive speculation of TurboSpec, arXiv 2406.14066). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import SpeculationStats
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import (
    ScheduledSequence,
    StepBuilder,
    StepPlan,
    StepResult,
)

MAX_PAUSE_TOKENS = 16
"""Longest pause of one sequence's drafting, in tokens: if nothing can be drafted, one token in 16
is computed in vain."""


@dataclass(slots=True)
class DraftLength:
    """The adaptive draft length of one sequence.

    Args:
        limit: maximum number of draft tokens in a step, and the initial length.
    """

    limit: int
    _length: int = field(init=False)
    _pause_tokens: int = 1
    _resumes_at: int = 0

    def __post_init__(self) -> None:
        self._length = self.limit

    def at(self, num_tokens: int) -> int:
        """Returns how many draft tokens to try when the sequence has ``num_tokens`` tokens."""
        return self._length if num_tokens >= self._resumes_at else 0

    def learn(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Adapt the length to the outcome of a step.

        Args:
            num_drafted: number of draft tokens that ran; 0 changes nothing.
            num_accepted: how many of them, from the first on, were accepted.
            num_tokens: length of the sequence after the step.
        """
        if not num_drafted:
            return
        if num_accepted:
            self._pause_tokens = 1
        elif self._length == 1:
            self._resumes_at = num_tokens + self._pause_tokens
            self._pause_tokens = min(2 * self._pause_tokens, MAX_PAUSE_TOKENS)
        change = 2 if num_accepted == num_drafted else -1
        self._length = min(max(self._length + change, 1), self.limit)


_MIN_SAMPLES = 3
"""Steps with (or without) drafts from which on their median is trusted, since anything may delay a
single step. As many steps without drafts run in a row, because with async scheduling the first of
them waits for a step with drafts."""

_INITIAL_PERIOD, _PERIOD = 8, 96
"""Number of steps of which ``_MIN_SAMPLES`` run without drafts to compare: at first, and later."""

_MIN_PAUSE, _MAX_PAUSE = 16, 1024
"""Bounds of a pause of drafting at one batch size, in steps."""


class DraftGate:
    """Decides whether drafts pay at one batch size, by tokens per second with and without them."""

    def __init__(self) -> None:
        self._with: deque[float] = deque(maxlen=2 * _MIN_SAMPLES - 1)
        self._without: deque[float] = deque(maxlen=2 * _MIN_SAMPLES - 1)
        self._num_steps = 0
        self._all_accepted = False
        self._pause = _MIN_PAUSE
        self._num_paused = 0

    @property
    def allows(self) -> bool:
        """Whether the next step of this batch size may have drafts."""
        if self._num_paused:
            return False
        if self._all_accepted:  # n times the tokens for at most n times the work: no loss
            return True
        every = _INITIAL_PERIOD if len(self._without) < _MIN_SAMPLES else _PERIOD
        return self._num_steps % every < every - _MIN_SAMPLES

    def learn(self, num_tokens: int, num_drafted: int, num_rejected: int, seconds: float) -> None:
        """Update the measurements with a step: the tokens that it yielded, the tokens that were
        drafted, how many of these were rejected, and its duration."""
        self._all_accepted = num_drafted > num_rejected == 0
        (self._with if num_drafted else self._without).append(num_tokens / max(seconds, 1e-9))
        if self._num_paused:
            self._num_paused -= 1
            return
        self._num_steps += not self._all_accepted
        if min(len(self._with), len(self._without)) < _MIN_SAMPLES:
            return
        if median(self._with) < median(self._without):
            self._num_paused = self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            self._with.clear()  # after the pause, drafts are measured afresh
        else:
            self._pause = _MIN_PAUSE


class DraftScheduler:
    """Adds draft tokens to planned steps; owned by the scheduler.

    Drafts use only what a planned step leaves: tokens of its budget, and blocks that are still free
    when all requests have theirs. They never delay or preempt a request.

    Args:
        limits: bounds of draft tokens and of outputs.
        blocks: allocates the block tables.
    """

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self._limits = limits
        self._blocks = blocks
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted_at = [0] * limits.num_speculative_tokens
        self._worth: dict[int, DraftGate] = {}  # by bit length of the batch size

    def plan(self, step: StepBuilder, requests: Mapping[str, Request]) -> None:
        """Give the step's decodes draft tokens, in order of priority, if drafting pays."""
        if not self._pays(len(step.decodes)):
            return
        for index, sequence in enumerate(step.decodes):
            request = requests[sequence.request_id]
            if self._blocks.writes_shared(request):  # copied first, since a sibling joined
                continue
            # without the token that this step samples
            max_length = request.num_tokens_with_drafts - 1
            available = min(step.budget, self._blocks.num_free_tokens(request, max_length))
            num_draft_tokens = min(self._num_useful(request, max_length), available)
            if num_draft_tokens > 0:
                growth = self._blocks.allocate_drafts(request, max_length + num_draft_tokens)
                step.draft(index, request, num_draft_tokens, growth)

    def complete(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """Learn from a sequence that ran with drafts allowed; its request has the new tokens."""
        if request.status is not RequestStatus.FINISHED:  # steps in flight may write to its blocks
            self._blocks.free_drafts(request)
        num_drafted = result.num_drafted.get(sequence.request_id, 0)
        num_accepted = len(result.tokens_of(sequence.request_id)) - 1
        if num_drafted:
            self._num_drafts += 1
            self._num_draft_tokens += num_drafted
            self._length(request).learn(num_drafted, num_accepted, len(request.token_ids))
        for position in range(num_accepted):
            self._accepted_at[position] += 1

    def learn(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from the duration of a step; only steps of decodes alone count."""
        num_decodes = len(plan.sequences)
        if num_decodes and all(sequence.count == 1 for sequence in plan.sequences):
            num_tokens = result.num_tokens
            worth = self._worth.setdefault(num_decodes.bit_length(), DraftGate())
            num_drafted = sum(result.num_drafted.values())
            worth.learn(num_tokens, num_drafted, num_decodes + num_drafted - num_tokens, seconds)

    def _pays(self, num_decodes: int) -> bool:
        most = self._limits.max_seqs_with_drafts
        if most is not None and num_decodes > most:
            return False
        worth = self._worth.get(num_decodes.bit_length())
        return worth is None or worth.allows

    def stats(self) -> SpeculationStats | None:
        """Returns the counters of drafting so far; None if drafting is off."""
        if not self._accepted_at:
            return None
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted_at))

    def _num_useful(self, request: Request, max_length: int) -> int:
        """Returns how many drafts could become part of the output, which ends with one more sampled
        token.

        Args:
            request: the request.
            max_length: its maximum length when the step begins.
        """
        if not request.num_output_tokens:
            return 0
        length = self._length(request).at(len(request.token_ids))
        return min(length, request.max_num_tokens - max_length - 1)

    def _length(self, request: Request) -> DraftLength:
        if request.draft_length is None:
            request.draft_length = DraftLength(self._limits.num_speculative_tokens)
        return request.draft_length
