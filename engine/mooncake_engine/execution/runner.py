"""Runs step plans on one rank: inputs, forward pass, sampling, and what is kept of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mooncake_engine.execution.batch import NO_DRAFTS, StepInputs, make_inputs
from mooncake_engine.execution.block_mover import BlockMover
from mooncake_engine.execution.extension import LayerDone
from mooncake_engine.execution.grammar_masks import failures
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.logprobs import score_prompts
from mooncake_engine.execution.model_stage import Stage
from mooncake_engine.execution.pending import CompletedStep, PendingStep, UnsampledStep
from mooncake_engine.execution.request_state import RequestState, RequestTable
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.execution.speculation.checking import (
    check_drafts,
    draft_tokens,
)
from mooncake_engine.execution.speculation.continuation import Draft
from mooncake_engine.execution.speculation.proposer import Proposer
from mooncake_engine.models.context import ForwardContext
from mooncake_engine.scheduling.plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from mooncake_hal.backend import Event


class Batch(NamedTuple):
    """What a step runs.

    Args:
        sequences: the plan's.
        states: their requests.
        drafts: guesses behind the last tokens of requests, by id.
    """

    sequences: Sequence[ScheduledSequence]
    states: Sequence[RequestState]
    drafts: Mapping[str, Draft]


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What every runner works with.

    Args:
        model: this rank's stage.
        pool: where KV lives.
        requests: what is running.
        sampler: the same on every rank, so that all ranks choose the same tokens.
        mover: copies blocks.
        make_event: a new event of the rank's device.
        has_peers: whether somebody reads and writes KV who is not bound to the order of the
            device's work: to them a step is over when the device is through with it, and not when
            it is enqueued, which is soon enough for the steps behind it.
    """

    model: Stage
    pool: KVPool
    requests: RequestTable
    sampler: Sampler
    mover: BlockMover
    make_event: Callable[[], Event]
    has_peers: bool


class ModelRunner:
    """One rank's share of every step.

    Args:
        parts: what it works with.
        proposer: guesses tokens ahead; None if nobody does.
    """

    def __init__(self, parts: RunnerParts, proposer: Proposer | None = None) -> None:
        self._model = parts.model
        self._pool = parts.pool
        self._requests = parts.requests
        self._sampler = parts.sampler
        self._mover = parts.mover
        self._make_event = parts.make_event
        self._has_peers = parts.has_peers
        self._proposer = proposer
        self._kv = parts.pool.layers

    def run(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        """Do what the plan says, and wait until it is done."""
        return self.launch(plan, layer_done).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> PendingStep:
        """Do what the plan says; returns when the sampled tokens are known on the host, or, where
        none are sampled, when all is enqueued."""
        self._take_over(plan)
        if not plan.sequences:
            return self._end_unsampled(StepResult(plan.step, {}))
        batch = self._collect(plan)
        inputs = self._make_inputs(batch)
        hidden = self._forward(inputs, layer_done)
        if hidden is None:
            return self._end_unsampled(StepResult(plan.step, {}))
        return self._conclude(plan, batch, inputs, hidden)

    def close(self) -> None:
        """Free what the guesses need; the pool is its owner's. Idempotent."""
        if self._proposer is not None:
            self._proposer.close()

    def learn(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Take in what the last stage has sampled; before the step that runs these tokens."""
        for request_id, token_ids in tokens.items():
            self._requests.append(request_id, token_ids)

    def _take_over(self, plan: StepPlan) -> None:
        """What changes before the step runs."""
        self._requests.retire(plan.retired)
        self._requests.admit(plan.admitted)
        if self._proposer is not None:
            self._proposer.forget(plan.retired)
            self._proposer.forget(admitted.request_id for admitted in plan.admitted)
        self._mover.carry_out(plan)

    def _collect(self, plan: StepPlan) -> Batch:
        states = [self._state_of(sequence) for sequence in plan.sequences]
        if self._proposer is None:
            return Batch(plan.sequences, states, NO_DRAFTS)
        return Batch(plan.sequences, states, draft_tokens(self._proposer, plan, states))

    def _state_of(self, sequence: ScheduledSequence) -> RequestState:
        state = self._requests[sequence.request_id]
        if sequence.new_block_ids:
            tables = self._requests.tables
            tables.extend(state.row, sequence.new_block_ids, sequence.new_blocks_at)
        return state

    def _make_inputs(self, batch: Batch) -> StepInputs:
        pool = self._pool
        requests, drafts = self._requests, batch.drafts
        return make_inputs(
            batch.sequences, batch.states, requests, pool.block_size, pool.device, drafts
        )

    def _forward(self, inputs: StepInputs, layer_done: LayerDone | None) -> Tensor | None:
        context = ForwardContext(inputs.attention, self._kv, layer_done)
        return self._model.forward(inputs.token_ids, inputs.positions, context)

    def _conclude(
        self, plan: StepPlan, batch: Batch, inputs: StepInputs, hidden: Tensor
    ) -> PendingStep:
        """What comes of the hidden rows: [tokens, hidden]."""
        scores = score_prompts(hidden, *batch, self._model.logits)
        tokens = self._sample(hidden, inputs, batch.drafts)
        guessed = {name: len(draft.guesses) for name, draft in batch.drafts.items()}
        failed = failures(inputs.sampling)
        result = StepResult(plan.step, tokens, scores, failed, guessed)
        return CompletedStep(result) if inputs.sampling else self._end_unsampled(result)

    def _end_unsampled(self, result: StepResult) -> PendingStep:
        """Nothing was read back that the device had to finish for."""
        if not self._has_peers:
            return CompletedStep(result)
        end = self._make_event()
        end.record()
        return UnsampledStep(result, end)

    def _logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        rows = hidden if inputs.sampled_rows is None else hidden[inputs.sampled_rows]
        return self._model.logits(rows)

    def _sample(
        self, hidden: Tensor, inputs: StepInputs, drafts: Mapping[str, Draft]
    ) -> dict[str, tuple[SampledToken, ...]]:
        if not inputs.sampling:
            return {}
        logits = self._logits(hidden, inputs)
        if drafts:
            tokens = check_drafts(self._sampler, logits, inputs.sampling, drafts)
        else:
            sampled = self._sampler.sample(logits, inputs.sampling)
            pairs = zip(inputs.sampling, sampled, strict=True)
            tokens = {state.request_id: (token,) for state, token in pairs}
        for state in inputs.sampling:
            for token in tokens[state.request_id]:
                state.append(token.token_id)
        return tokens
