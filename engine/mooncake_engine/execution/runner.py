"""Runs step plans on one rank: inputs, forward pass, sampling, and what is kept of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mooncake_engine.execution.batch import StepInputs, make_inputs
from mooncake_engine.execution.block_mover import BlockMover
from mooncake_engine.execution.extension import LayerDone
from mooncake_engine.execution.grammar_masks import failures
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.logprobs import score_prompts
from mooncake_engine.execution.model_stage import ModelStage
from mooncake_engine.execution.request_state import RequestState, RequestTable
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.models.context import ForwardContext
from mooncake_engine.scheduling.plan import SampledToken, ScheduledSequence, StepPlan, StepResult


class ModelRunner:
    """One rank's share of every step.

    Args:
        model: this rank's stage.
        pool: where KV lives.
        requests: what is running.
        sampler: the same on every rank, so that all ranks choose the same tokens.
        mover: copies blocks.
        device: of the model and the pool.
    """

    def __init__(
        self,
        model: ModelStage,
        pool: KVPool,
        requests: RequestTable,
        sampler: Sampler,
        mover: BlockMover,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._requests = requests
        self._sampler = sampler
        self._mover = mover
        self._device = device
        first = pool.shard.layer_start
        self._kv = {first + index: pool.layer(index) for index in range(pool.shard.layers)}

    @torch.inference_mode()
    def run(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        """Do what the plan says; returns when the sampled tokens are known on the host, on the
        last stage, and on the others when theirs is handed on."""
        self._requests.retire(plan.retired)
        self._requests.admit(plan.admitted)
        self._mover.carry_out(plan)
        if not plan.sequences:
            return StepResult(plan.step, {})
        states = [self._state_of(sequence) for sequence in plan.sequences]
        inputs = make_inputs(
            plan.sequences, states, self._requests, self._pool.block_size, self._device
        )
        hidden = self._forward(inputs, layer_done)
        if hidden is None:
            return StepResult(plan.step, {})
        scores = score_prompts(hidden, plan.sequences, states, self._model.logits)
        tokens = self._sample(hidden, inputs)
        return StepResult(plan.step, tokens, scores, failures(inputs.sampling))

    def learn(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Take in what the last stage has sampled; before the step that runs these tokens."""
        for request_id, token_ids in tokens.items():
            self._requests.append(request_id, token_ids)

    def _state_of(self, sequence: ScheduledSequence) -> RequestState:
        state = self._requests[sequence.request_id]
        if sequence.new_block_ids:
            tables = self._requests.tables
            tables.extend(state.row, sequence.new_block_ids, sequence.new_blocks_at)
        return state

    def _forward(self, inputs: StepInputs, layer_done: LayerDone | None) -> Tensor | None:
        context = ForwardContext(inputs.attention, self._kv, layer_done)
        return self._model.forward(inputs.token_ids, inputs.positions, context)

    def _sample(self, hidden: Tensor, inputs: StepInputs) -> dict[str, tuple[SampledToken, ...]]:
        if not inputs.sampling:
            return {}
        rows = hidden if inputs.sampled_rows is None else hidden[inputs.sampled_rows]
        sampled = self._sampler.sample(self._model.logits(rows), inputs.sampling)
        for state, token in zip(inputs.sampling, sampled, strict=True):
            state.append(token.token_id)
        return {
            state.request_id: (token,)
            for state, token in zip(inputs.sampling, sampled, strict=True)
        }
