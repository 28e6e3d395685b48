"""Runs step plans on one rank: inputs, forward pass, sampling, and the state of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from mooncake_engine.execution.input_batch import StepInputs, make_inputs
from mooncake_engine.execution.logprobs import score_prompts
from mooncake_engine.execution.parallel_state import StageRunner
from mooncake_engine.execution.request_table import CachedRequest, RequestTable
from mooncake_engine.execution.sampler import NO_TOKEN, Sampler, grammar_failures
from mooncake_engine.execution.speculation.drafts import (
    NO_DRAFTS,
    Proposer,
    StepDrafts,
    propose_drafts,
    verify_drafts,
)
from mooncake_engine.execution.worker_extension import LayerDone
from mooncake_engine.kv_cache.block_copier import BlockCopier
from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_engine.scheduling.step_plan import (
    ExpertRound,
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from mooncake_hal.backend import Event

NO_FINITE_LOGIT = (
    "there is no finite logit for the next token: the model overflowed, its checkpoint is damaged, "
    "or the sampling parameters leave no token"
)
"""Why a request fails whose row has no token."""


class PendingStep(Protocol):
    """A step that was submitted, or enqueued on a device."""

    def result(self) -> StepResult:
        """The step's result. Blocks until the sampled tokens are known. Any thread.

        With peers it also waits until the device has finished the step: peers ignore the order of
        a stream, so blocks may be freed for them only then.

        Raises:
            EngineDead: from an executor: a rank died or failed; its reason is in the message.
                Nothing can be executed any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A PendingStep that is over."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


@dataclass(frozen=True, slots=True, eq=False)
class UnsampledStep:
    """A PendingStep that the device runs, and of which the host needs no token.

    Args:
        outcome: known already.
        end: recorded behind all of its work.
    """

    outcome: StepResult
    end: Event

    def result(self) -> StepResult:
        self.end.synchronize()
        return self.outcome


class Batch(NamedTuple):
    """What a step runs.

    Args:
        sequences: the plan's.
        states: their requests.
        drafts: draft tokens behind the last tokens of requests.
    """

    sequences: Sequence[ScheduledSequence]
    states: Sequence[CachedRequest]
    drafts: StepDrafts


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What every runner works with.

    Args:
        model: this rank's stage.
        pool: where KV lives.
        requests: what is running.
        sampler: the same on every rank, so that all ranks choose the same tokens.
        copier: copies blocks.
        make_event: a new event of the rank's device.
        has_peers: whether peers read and write KV, which are not bound to the order of the device's
            work: for them a step is complete when the device has finished it, and not when it is
            enqueued, which is soon enough for the steps behind it.
        serve_experts: see ``Model``.
    """

    model: StageRunner
    pool: KVPool
    requests: RequestTable
    sampler: Sampler
    copier: BlockCopier
    make_event: Callable[[], Event]
    has_peers: bool
    serve_experts: Callable[[ExpertRound], None]


class ModelRunner:
    """One rank's share of every step.

    Args:
        parts: what it works with.
        proposer: proposes draft tokens; None if nothing does.
    """

    def __init__(self, parts: RunnerParts, proposer: Proposer | None = None) -> None:
        self._model = parts.model
        self._pool = parts.pool
        self._requests = parts.requests
        self._sampler = parts.sampler
        self._copier = parts.copier
        self._make_event = parts.make_event
        self._has_peers = parts.has_peers
        self._serve_experts = parts.serve_experts
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
            if plan.expert_round is not None:
                self._serve_experts(plan.expert_round)
            return self._end_unsampled(self._unsampled(plan))
        batch = self._collect(plan)
        inputs = self._make_inputs(batch)
        context = ForwardContext(inputs.attention, self._kv, layer_done, plan.expert_round)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, context)
        if hidden is None:
            return self._end_unsampled(self._unsampled(plan))
        return self._conclude(plan, batch, inputs, hidden)

    def close(self) -> None:
        """End copies and free what the draft tokens need; the pool is its owner's. Idempotent."""
        self._copier.close()
        if self._proposer is not None:
            self._proposer.close()

    def learn(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Take in what the last stage has sampled; before the step that runs these tokens."""
        for request_id, token_ids in tokens.items():
            self._requests.append(request_id, token_ids)

    def _take_over(self, plan: StepPlan) -> None:
        """What changes before the step runs."""
        self._requests.remove(plan.removed)
        self._requests.admit(plan.new_requests)
        if self._proposer is not None:
            self._proposer.forget(plan.removed)
            self._proposer.forget(new_request.request_id for new_request in plan.new_requests)
        self._copier.copy(plan)

    def _collect(self, plan: StepPlan) -> Batch:
        """The step's requests, whose block tables get the step's new blocks, and their drafts."""
        states = self._requests.find([sequence.request_id for sequence in plan.sequences])
        tables = self._requests.tables
        for index, block_ids in enumerate([s.new_block_ids for s in plan.sequences]):
            if block_ids:
                at = plan.sequences[index].new_blocks_at
                tables.extend(states[index].row, block_ids, at)
        if self._proposer is None:
            return Batch(plan.sequences, states, NO_DRAFTS)
        pairs = zip(plan.sequences, states, strict=True)
        sequences = [_behind_drafts(sequence, state) for sequence, state in pairs]
        return Batch(sequences, states, propose_drafts(self._proposer, sequences, states))

    def _make_inputs(self, batch: Batch) -> StepInputs:
        pool = self._pool
        requests, drafts = self._requests, batch.drafts
        return make_inputs(
            batch.sequences, batch.states, requests, pool.block_size, pool.device, drafts
        )

    def _conclude(
        self, plan: StepPlan, batch: Batch, inputs: StepInputs, hidden: Tensor
    ) -> PendingStep:
        """What comes of the hidden rows: [tokens, hidden]."""
        scores = score_prompts(hidden, *batch, self._model.logits)
        tokens = self._sample(hidden, inputs, batch.drafts)
        result = StepResult(
            plan.step,
            tokens,
            scores,
            failed_requests(tokens),
            grammar_failures(inputs.sampling),
            batch.drafts.num_drafted,
            is_copying=self._copier.is_copying,
        )
        return CompletedStep(result) if inputs.sampling else self._end_unsampled(result)

    def _unsampled(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, {}, is_copying=self._copier.is_copying)

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
        self, hidden: Tensor, inputs: StepInputs, drafts: StepDrafts
    ) -> dict[str, tuple[SampledToken, ...]]:
        if not inputs.sampling:
            return {}
        logits = self._logits(hidden, inputs)
        if drafts.by_request:
            tokens = verify_drafts(self._sampler, logits, inputs.sampling, drafts).tokens()
        else:
            sampled = self._sampler.sample(logits, inputs.sampling)
            pairs = zip(inputs.sampling, sampled, strict=True)
            tokens = {state.request_id: (token,) for state, token in pairs}
        append_tokens(inputs.sampling, tokens)
        return tokens


def append_tokens(
    states: Sequence[CachedRequest], tokens: Mapping[str, Sequence[SampledToken]]
) -> None:
    """Let requests know what was sampled for them."""
    for state in states:
        for token in tokens[state.request_id]:
            if token.token_id != NO_TOKEN:
                state.append(token.token_id)
            else:  # its next step may be planned already: it needs some token to run
                state.token_ids.append(0)


def failed_requests(tokens: Mapping[str, Sequence[SampledToken]]) -> dict[str, str]:
    """Why requests can't go on, by id: those whose row has no token."""
    return {
        name: NO_FINITE_LOGIT for name, (*_, last) in tokens.items() if last.token_id == NO_TOKEN
    }


def _behind_drafts(sequence: ScheduledSequence, state: CachedRequest) -> ScheduledSequence:
    """The same from the newest token on, whose position was not known when it was planned."""
    if not sequence.num_unverified_drafts:
        return sequence
    return replace(sequence, start=len(state.token_ids) - sequence.count)
