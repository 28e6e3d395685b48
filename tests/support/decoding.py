"""Decode steps of an executor, one at a time: what speed and waiting are measured on."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_engine.execution.executor import Executor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan

GREEDY = SamplingParams(temperature=0.0)


class Decoder:
    """Sequences that have their prompts behind them; made of the executor's first blocks.

    Args:
        executor: loaded, and warm.
        prompts: token ids, of one length.
        room: tokens that a sequence may grow by; then it begins again behind its prompt.
        num_draft_tokens: tried with each step; then ``room`` is for all steps.
    """

    def __init__(
        self,
        executor: Executor,
        prompts: Sequence[tuple[int, ...]],
        room: int,
        num_draft_tokens: int = 0,
    ) -> None:
        self._executor = executor
        self._num_draft_tokens = num_draft_tokens
        self._begin = len(prompts[0])
        self._end = self._begin + room
        blocks = -(-self._end // executor.info.block_size)
        new_requests = tuple(
            NewRequest(
                f"decoder-{row}",
                prompt,
                len(prompt),
                GREEDY,
                0,
                tuple(range(row * blocks, (row + 1) * blocks)),
            )
            for row, prompt in enumerate(prompts)
        )
        self._positions = {request.request_id: self._begin for request in new_requests}
        sequences = tuple(ScheduledSequence(name, 0, self._begin) for name in self._positions)
        executor.execute(StepPlan(0, new_requests=new_requests, sequences=sequences))

    def step(self) -> None:
        """One token more for every sequence, and the draft tokens that hold."""
        count = self._num_draft_tokens
        sequences = tuple(
            ScheduledSequence(name, position, 1, num_draft_tokens=count)
            for name, position in self._positions.items()
        )
        result = self._executor.execute(StepPlan(1, sequences=sequences))
        for name, tokens in result.tokens.items():
            position = self._positions[name] + len(tokens)
            assert not count or position + count < self._end, "there is no room for drafts"
            self._positions[name] = position if position < self._end else self._begin

    def close(self) -> None:
        """Retire the sequences."""
        self._executor.execute(StepPlan(2, removed=tuple(self._positions)))
