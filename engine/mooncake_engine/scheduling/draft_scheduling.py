"""How many draft tokens each sequence gets in a step, how many of them were accepted, and whether
they are worth what they cost.

The draft length adapts per sequence: two more after all drafts of a step were accepted, one less
otherwise (the heuristic of Hugging Face's assisted generation). If the last remaining draft is
rejected too, drafting pauses, each time twice as long.

A draft token costs next to nothing in a step that waits for the weights to be read, and as much as
a prompt token in one that computes. Which of them a step is depends on the batch: so steps with and
without drafts are measured by batch size, and drafting stops where it brings fewer tokens per
second (after the adaptive speculation of TurboSpec, arXiv 2406.14066). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import SpeculationStats
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import (
    ScheduledSequence,
    StepBuilder,
    StepPlan,
    StepResult,
)

LONGEST_REST = 16
"""Tokens without draft tokens, at most: where nothing can be drafted, one in so many is computed in
vain."""


@dataclass(slots=True)
class DraftLength:
    """One sequence's.

    Args:
        limit: most draft tokens in a step; it begins with that.
    """

    limit: int
    _length: int = field(init=False)
    _rest: int = 1
    _resumes_at: int = 0

    def __post_init__(self) -> None:
        self._length = self.limit

    def at(self, num_tokens: int) -> int:
        """How many draft tokens to try behind ``num_tokens`` tokens."""
        return self._length if num_tokens >= self._resumes_at else 0

    def learn(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Take in what became of draft tokens.

        Args:
            num_drafted: how many were run; with none there is nothing to learn.
            num_accepted: how many of them, from the first on, were accepted.
            num_tokens: of the sequence, now.
        """
        if not num_drafted:
            return
        if num_accepted:
            self._rest = 1
        elif self._length == 1:
            self._resumes_at = num_tokens + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        change = 2 if num_accepted == num_drafted else -1
        self._length = min(max(self._length + change, 1), self.limit)


_FEW_STEPS = 3
"""Steps of a kind whose median counts: a single one may have been held up by anything. Those
without drafts come in a row: where steps run ahead, the first one has waited for one with drafts.
"""

_EARLY, _RARELY = 8, 96
"""A few in so many steps run without drafts, to know what that takes: at first, and later."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 1024
"""Steps without drafts, before these are tried again."""


class DraftWorth:
    """Whether drafts pay at one batch size, by tokens per second with and without them."""

    def __init__(self) -> None:
        self._with: deque[float] = deque(maxlen=2 * _FEW_STEPS - 1)
        self._without: deque[float] = deque(maxlen=2 * _FEW_STEPS - 1)
        self._num_steps = 0
        self._all_accepted = False
        self._pause = _SHORTEST_PAUSE
        self._num_paused = 0

    @property
    def allows(self) -> bool:
        """Whether the next step of this size may have drafts."""
        if self._num_paused:
            return False
        if self._all_accepted:  # n times the tokens for at most n times the work: no loss
            return True
        every = _EARLY if len(self._without) < _FEW_STEPS else _RARELY
        return self._num_steps % every < every - _FEW_STEPS

    def learn(self, num_tokens: int, num_drafted: int, num_rejected: int, seconds: float) -> None:
        """Take in how many tokens came of a step, how many were drafted for it, how many of these
        were rejected, and its time."""
        self._all_accepted = num_drafted > num_rejected == 0
        (self._with if num_drafted else self._without).append(num_tokens / max(seconds, 1e-9))
        if self._num_paused:
            self._num_paused -= 1
            return
        self._num_steps += not self._all_accepted
        if min(len(self._with), len(self._without)) < _FEW_STEPS:
            return
        if median(self._with) < median(self._without):
            self._num_paused = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._with.clear()  # what comes after the pause is judged by itself
        else:
            self._pause = _SHORTEST_PAUSE


class DraftScheduler:
    """Drafts run in what a step has to spare: tokens of its budget, and blocks that are free when
    all requests have had theirs. They never make a request wait or preempt one.

    Args:
        limits: how many at most, and where outputs end.
        blocks: the tables.
    """

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self._limits = limits
        self._blocks = blocks
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted_at = [0] * limits.num_speculative_tokens
        self._worth: dict[int, DraftWorth] = {}  # by the batch size's bits

    def plan(self, step: StepBuilder, requests: Mapping[str, Request]) -> None:
        """Give the step's decodes draft tokens, by priority, where that pays."""
        if not self._pays(len(step.decodes)):
            return
        for index, sequence in enumerate(step.decodes):
            request = requests[sequence.request_id]
            if self._blocks.writes_shared(request):  # a sibling came: it is parted from first
                continue
            most_tokens = request.most_tokens - 1  # before the one that this step samples
            room = min(step.budget, self._blocks.num_free_tokens(request, most_tokens))
            num_draft_tokens = min(self._useful(request, most_tokens), room)
            if num_draft_tokens > 0:
                growth = self._blocks.allocate_drafts(request, most_tokens + num_draft_tokens)
                step.draft(index, request, num_draft_tokens, growth)

    def complete(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """A sequence that was allowed drafts has run, and the request has its tokens."""
        if request.block_ids:  # it has not ended
            self._blocks.free_drafts(request)
        num_drafted = result.num_drafted.get(sequence.request_id, 0)
        num_accepted = len(result.tokens[sequence.request_id]) - 1
        if num_drafted:
            self._num_drafts += 1
            self._num_draft_tokens += num_drafted
            self._length(request).learn(num_drafted, num_accepted, len(request.token_ids))
        for position in range(num_accepted):
            self._accepted_at[position] += 1

    def learn(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Take in what a step of nothing but decodes took."""
        num_decodes = len(plan.sequences)
        if num_decodes and all(sequence.count == 1 for sequence in plan.sequences):
            num_tokens = sum(map(len, result.tokens.values()))
            worth = self._worth.setdefault(num_decodes.bit_length(), DraftWorth())
            num_drafted = sum(result.num_drafted.values())
            worth.learn(num_tokens, num_drafted, num_decodes + num_drafted - num_tokens, seconds)

    def _pays(self, num_decodes: int) -> bool:
        most = self._limits.most_seqs_with_drafts
        if most is not None and num_decodes > most:
            return False
        worth = self._worth.get(num_decodes.bit_length())
        return worth is None or worth.allows

    def stats(self) -> SpeculationStats | None:
        """What came of it so far; None if nothing is ever drafted."""
        if not self._accepted_at:
            return None
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted_at))

    def _useful(self, request: Request, most_tokens: int) -> int:
        """Drafts that may become part of the output: one more token always comes after
        them.

        Args:
            request: whose.
            most_tokens: how many it may have when the step begins.
        """
        if not request.num_output_tokens:
            return 0
        length = self._length(request).at(len(request.token_ids))
        return min(length, request.max_num_tokens - most_tokens - 1)

    def _length(self, request: Request) -> DraftLength:
        if request.draft_length is None:
            request.draft_length = DraftLength(self._limits.num_speculative_tokens)
        return request.draft_length
