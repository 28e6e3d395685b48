"""Drives an executor through whole requests, as a scheduler would, in a fixed simple order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mooncake_engine.execution.executor import Executor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import (
    NewRequest,
    SampledToken,
    ScheduledSequence,
    StepPlan,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@dataclass
class RunningRequest:
    """One request in flight.

    Args:
        request_id: its id.
        prompt: its tokens.
        sampling: its parameters; it runs for ``max_tokens``, end tokens are ignored.
        seed: of its random draws.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.prompt) + len(self.sampled)

    @property
    def is_finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.sampled) == self.sampling.max_tokens

    @property
    def output(self) -> list[int]:
        """The answer's token ids."""
        return [token.token_id for token in self.sampled]


class Stepper:
    """Runs requests to completion: all decodes of a step first, then prompts in chunks.

    Args:
        executor: runs the plans.
        chunk: maximum prompt tokens of one request per step.
    """

    def __init__(self, executor: Executor, chunk: int = 64) -> None:
        self._executor = executor
        self._chunk = chunk
        # allocated from the end: block 0, which warm-up writes and padding addresses, comes last
        self._free: list[int] = list(range(executor.info.num_blocks))
        self._step = 0

    def generate(self, requests: Sequence[RunningRequest]) -> list[list[int]]:
        """Token ids of every answer."""
        removed: tuple[str, ...] = ()
        new_requests = tuple(self._admit(requests))
        while running := [request for request in requests if not request.is_finished]:
            sequences = [self._schedule(request) for request in running]
            sequences.sort(key=lambda sequence: sequence.count != 1)
            plan = StepPlan(self._step, removed, new_requests, sequences=tuple(sequences))
            result = self._executor.execute_model(plan).result()
            self._step, new_requests = self._step + 1, ()
            for request in running:
                if request.request_id in result.tokens:
                    request.sampled.extend(result.tokens[request.request_id])
            removed = tuple(r.request_id for r in running if r.is_finished)
        for request in requests:
            self._free += request.blocks
        self._executor.execute_model(StepPlan(self._step, removed)).result()
        return [request.output for request in requests]

    def _admit(self, requests: Sequence[RunningRequest]) -> Iterator[NewRequest]:
        for request in requests:
            yield NewRequest(
                request.request_id,
                request.prompt + tuple(request.output),
                len(request.prompt),
                request.sampling,
                request.seed,
                tuple(request.blocks),
            )

    def _schedule(self, request: RunningRequest) -> ScheduledSequence:
        count = min(self._chunk, request.num_tokens - request.done)
        start, request.done = request.done, request.done + count
        block_size = self._executor.info.block_size
        new_blocks: list[int] = []
        while (len(request.blocks) + len(new_blocks)) * block_size < request.done:
            new_blocks.append(self._free.pop())
        request.blocks += new_blocks
        is_sampling = request.done == request.num_tokens
        return ScheduledSequence(request.request_id, start, count, tuple(new_blocks), is_sampling)
