"""Runs an executor's decode steps one at a time, to measure their speed and their waits."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_engine.execution.executor import Executor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan

GREEDY = SamplingParams(temperature=0.0)
MOST_PROMPT_TOKENS = 2048
"""Prompt tokens per step: the size that an engine is warmed up for."""


class Decoder:
    """Sequences whose prompts are computed; they use the executor's first blocks.

    Args:
        executor: loaded and warmed up.
        prompts: token ids, all of the same length.
        room: how many tokens a sequence may grow by before it restarts at the end of its prompt.
        num_draft_tokens: verified in each step; ``room`` then has to suffice for all steps.
        sampling: of every sequence.
    """

    def __init__(
        self,
        executor: Executor,
        prompts: Sequence[tuple[int, ...]],
        room: int,
        num_draft_tokens: int = 0,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self._executor = executor
        self._num_draft_tokens = num_draft_tokens
        self._begin = len(prompts[0])
        self._end = self._begin + room
        blocks = -(-self._end // executor.info.block_size)
        needed, available = len(prompts) * blocks, executor.info.num_blocks
        assert needed <= available, f"{needed} blocks are needed, the executor has {available}"
        new_requests = tuple(
            NewRequest(
                f"decoder-{row}",
                prompt,
                len(prompt),
                sampling,
                row,
                tuple(range(row * blocks, (row + 1) * blocks)),
            )
            for row, prompt in enumerate(prompts)
        )
        self._positions = {request.request_id: self._begin for request in new_requests}
        per_step = max(1, MOST_PROMPT_TOKENS // self._begin)
        for first in range(0, len(new_requests), per_step):
            part = new_requests[first : first + per_step]
            sequences = tuple(ScheduledSequence(new.request_id, 0, self._begin) for new in part)
            executor.execute_model(StepPlan(0, new_requests=part, sequences=sequences)).result()

    def step(self) -> None:
        """One more token for every sequence, and the accepted draft tokens."""
        count = self._num_draft_tokens
        sequences = tuple(
            ScheduledSequence(name, position, 1, num_draft_tokens=count)
            for name, position in self._positions.items()
        )
        result = self._executor.execute_model(StepPlan(1, sequences=sequences)).result()
        for name, tokens in result.tokens.items():
            position = self._positions[name] + len(tokens)
            assert not count or position + count < self._end, "no blocks are left for draft tokens"
            self._positions[name] = position if position < self._end else self._begin

    def close(self) -> None:
        """Free the sequences."""
        self._executor.execute_model(StepPlan(2, removed=tuple(self._positions))).result()
