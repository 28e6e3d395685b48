"""Which sequences may guess tokens ahead in a step, how many, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_engine.messages import SpeculationStats
from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.guessing import GuessLength
from mooncake_engine.scheduling.limits import SchedulerLimits
from mooncake_engine.scheduling.plan import ScheduledSequence, StepResult
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_builder import StepBuilder


class Speculation:
    """Drafts run in what a step has to spare: tokens of its budget, and blocks that are free when
    everybody else has had theirs. They never make a request wait or give way.

    Args:
        limits: how many at most, and where answers end.
        blocks: the tables.
    """

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self._limits = limits
        self._blocks = blocks
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted_at = [0] * limits.num_speculative_tokens

    def plan(self, step: StepBuilder, requests: Mapping[str, Request]) -> None:
        """Let decodes of the step guess ahead, the most urgent first."""
        for index, sequence in enumerate(step.decodes):
            request = requests[sequence.request_id]
            room = min(step.budget, self._blocks.room_for_more(request))
            num_guesses = min(self._useful(request), room)
            if num_guesses > 0:
                growth = self._blocks.lend(request, len(request.token_ids) + num_guesses)
                step.draft(index, num_guesses, growth)

    def settle(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """A sequence that was allowed drafts has run, and the request has its tokens."""
        if request.block_ids:  # it has not ended
            self._blocks.reclaim(request)
        num_guessed = result.guessed.get(sequence.request_id, 0)
        num_accepted = len(result.tokens[sequence.request_id]) - 1
        if num_guessed:
            self._num_drafts += 1
            self._num_draft_tokens += num_guessed
            self._length(request).learn(num_guessed, num_accepted, len(request.token_ids))
        for position in range(num_accepted):
            self._accepted_at[position] += 1

    def stats(self) -> SpeculationStats | None:
        """What came of it so far; None if nothing is ever guessed."""
        if not self._accepted_at:
            return None
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted_at))

    def _useful(self, request: Request) -> int:
        """Drafts that may well become part of the answer: one more token always comes after
        them."""
        if not request.num_output_tokens:
            return 0
        num_tokens = len(request.token_ids)
        return min(self._length(request).at(num_tokens), request.max_num_tokens - num_tokens - 1)

    def _length(self, request: Request) -> GuessLength:
        if request.guess_length is None:
            request.guess_length = GuessLength(self._limits.num_speculative_tokens)
        return request.guess_length
