"""Runs step plans on one rank: builds inputs, runs the forward pass, samples, updates requests.

``Worker`` owns one ``ModelRunner`` per rank, or the ``AsyncModelRunner`` built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from mooncake_engine.execution.input_batch import InputBuilder, StepInputs
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
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory
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
"""The error of a request for which the sampler returned ``NO_TOKEN``."""


class PendingStep(Protocol):
    """Handle of a step that was submitted to an executor, or enqueued on a device."""

    def result(self) -> StepResult:
        """Return the step's result. Blocks until the sampled tokens are known. Any thread.

        If the instance has peers, it also blocks until the device has finished the step: a peer's
        reads and writes are not ordered by the device's stream, so the scheduler must not free
        blocks earlier.

        Raises:
            EngineDead: raised by an executor's steps: a rank died or failed, the message has its
                reason. The executor can't execute anything any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A PendingStep whose result is known already."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


@dataclass(frozen=True, slots=True, eq=False)
class UnsampledStep:
    """A PendingStep in flight on the device that samples nothing.

    Args:
        outcome: the step's result, which does not depend on the device.
        end: event recorded after all of the step's work.
    """

    outcome: StepResult
    end: Event

    def result(self) -> StepResult:
        self.end.synchronize()
        return self.outcome


class Batch(NamedTuple):
    """The sequences of one step.

    Args:
        sequences: from the step plan.
        states: the request of each sequence.
        drafts: draft tokens that run after the last tokens of their requests.
    """

    sequences: Sequence[ScheduledSequence]
    states: Sequence[CachedRequest]
    drafts: StepDrafts


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The collaborators of a model runner.

    Args:
        model: this rank's stage of the model.
        pool: the rank's KV cache.
        requests: the requests that are running.
        sampler: deterministic, so that all ranks choose the same tokens.
        copier: copies KV blocks within the pool and to and from host memory.
        make_event: makes an event of the rank's device.
        has_peers: whether peers read and write this rank's KV. Their accesses are not ordered by
            the device's stream, so a step is complete only when the device has finished it; without
            peers it is complete as soon as it is enqueued, because later steps are enqueued after
            it.
        serve_experts: see ``Model``.
    """

    model: StageRunner
    pool: KVCacheMemory
    requests: RequestTable
    sampler: Sampler
    copier: BlockCopier
    make_event: Callable[[], Event]
    has_peers: bool
    serve_experts: Callable[[ExpertRound], None]


class ModelRunner:
    """Runs one rank's share of every step.

    Args:
        parts: the runner's collaborators.
        proposer: proposes draft tokens; None without speculative decoding.
    """

    def __init__(self, parts: RunnerParts, proposer: Proposer | None = None) -> None:
        self._model = parts.model
        self._requests = parts.requests
        self._sampler = parts.sampler
        self._copier = parts.copier
        self._make_event = parts.make_event
        self._has_peers = parts.has_peers
        self._serve_experts = parts.serve_experts
        self._proposer = proposer
        self._kv = parts.pool.layers
        self._inputs = InputBuilder(parts.requests, parts.pool.block_size, parts.pool.device)

    def run(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        """Launch the plan and wait for its result."""
        return self.launch(plan, layer_done).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> PendingStep:
        """Run the plan. Returns when the sampled tokens are on the host, or, if the step samples
        none, when all of its work is enqueued."""
        self._update_requests(plan)
        if not plan.sequences:
            if plan.expert_round is not None:
                self._serve_experts(plan.expert_round)
            return self._pending_unsampled(self._unsampled(plan))
        batch = self._make_batch(plan)
        inputs = self._make_inputs(batch)
        context = ForwardContext(inputs.attention, self._kv, layer_done, plan.expert_round)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, context)
        if hidden is None:
            return self._pending_unsampled(self._unsampled(plan))
        return self._finish_step(plan, batch, inputs, hidden)

    def close(self) -> None:
        """Stop the copier and close the proposer. Does not close the pool. Idempotent."""
        self._copier.close()
        if self._proposer is not None:
            self._proposer.close()

    def append_sampled(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Append tokens that the last stage sampled. Call before the step that runs them."""
        for request_id, token_ids in tokens.items():
            self._requests.append(request_id, token_ids)

    def _update_requests(self, plan: StepPlan) -> None:
        """Apply the plan's changes to requests and KV blocks, before the forward pass."""
        self._requests.remove(plan.removed)
        self._requests.admit(plan.new_requests)
        if self._proposer is not None:
            self._proposer.forget(plan.removed)
            self._proposer.forget(new_request.request_id for new_request in plan.new_requests)
        self._copier.copy(plan)

    def _make_batch(self, plan: StepPlan) -> Batch:
        """Look up the step's requests, extend their block tables, and propose their drafts."""
        states = self._requests.find([sequence.request_id for sequence in plan.sequences])
        tables, pairs = self._requests.tables, zip(plan.sequences, states, strict=True)
        for sequence, state in [pair for pair in pairs if pair[0].new_block_ids]:
            tables.extend(state.row, sequence.new_block_ids, sequence.new_blocks_at)
        if self._proposer is None:
            return Batch(plan.sequences, states, NO_DRAFTS)
        pairs = zip(plan.sequences, states, strict=True)
        sequences = [_start_at_newest_token(sequence, state) for sequence, state in pairs]
        return Batch(sequences, states, propose_drafts(self._proposer, sequences, states))

    def _make_inputs(self, batch: Batch) -> StepInputs:
        return self._inputs.build(*batch)

    def _finish_step(
        self, plan: StepPlan, batch: Batch, inputs: StepInputs, hidden: Tensor
    ) -> PendingStep:
        """Sample from the hidden rows, [tokens, hidden], and build the step's result."""
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
        return CompletedStep(result) if inputs.sampling else self._pending_unsampled(result)

    def _unsampled(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, {}, is_copying=self._copier.is_copying)

    def _pending_unsampled(self, result: StepResult) -> PendingStep:
        """Wrap a result that needed no read from the device, which may still run the step."""
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
    """Append each request's sampled tokens to its state."""
    for state in states:
        for token in tokens[state.request_id]:
            if token.token_id != NO_TOKEN:
                state.append(token.token_id)
            else:  # the request fails, but its next step may be planned already: run any token
                state.token_ids.append(0)


def failed_requests(tokens: Mapping[str, Sequence[SampledToken]]) -> dict[str, str]:
    """Errors by request id, of the requests for which no token could be sampled."""
    return {
        name: NO_FINITE_LOGIT for name, (*_, last) in tokens.items() if last.token_id == NO_TOKEN
    }


def _start_at_newest_token(sequence: ScheduledSequence, state: CachedRequest) -> ScheduledSequence:
    """Start a sequence at its newest token. When the step was planned, its position was unknown:
    the draft tokens before it were not verified yet."""
    if not sequence.num_unverified_drafts:
        return sequence
    return replace(sequence, start=len(state.token_ids) - sequence.count)
