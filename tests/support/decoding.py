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
    """

    def __init__(self, executor: Executor, prompts: Sequence[tuple[int, ...]], room: int) -> None:
        self._executor = executor
        self._begin = self._position = len(prompts[0])
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
        self._names = [request.request_id for request in new_requests]
        sequences = tuple(ScheduledSequence(name, 0, self._begin) for name in self._names)
        executor.execute(StepPlan(0, new_requests=new_requests, sequences=sequences))

    def step(self) -> None:
        """One token more for every sequence."""
        sequences = tuple(ScheduledSequence(name, self._position, 1) for name in self._names)
        self._executor.execute(StepPlan(1, sequences=sequences))
        self._position += 1
        if self._position == self._end:
            self._position = self._begin

    def close(self) -> None:
        """Retire the sequences."""
        self._executor.execute(StepPlan(2, removed=tuple(self._names)))
