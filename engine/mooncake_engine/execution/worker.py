"""One rank of an instance: its model, its KV pool, and the extension beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.block_mover import BlockMover
from mooncake_engine.execution.device_sampling import sampling_ops
from mooncake_engine.execution.extension import (
    ExtensionContext,
    WorkerExtension,
    load_extension,
)
from mooncake_engine.execution.feed_forward import FeedForwardRunner, TokenFeed
from mooncake_engine.execution.graphs.decoding import DecodeGraphs
from mooncake_engine.execution.graphs.piecewise import PiecewiseGraphs
from mooncake_engine.execution.graphs.replayed_stage import ReplayedStage
from mooncake_engine.execution.kv_pool import KVPool, blocks_in
from mooncake_engine.execution.model_stage import ModelStage, Stage
from mooncake_engine.execution.pending import PendingStep
from mooncake_engine.execution.profiling import largest_steps, measure_peak, memory_for_kv
from mooncake_engine.execution.rank_place import RankGroups
from mooncake_engine.execution.request_state import RequestTable
from mooncake_engine.execution.runner import ModelRunner, RunnerParts
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.execution.setup import ExecutionSetup, block_bytes, rank_device, resize
from mooncake_engine.execution.speculation.draft_model import DraftModel, DraftModelProposer
from mooncake_engine.execution.speculation.ngram import NGramProposer
from mooncake_engine.execution.speculation.proposer import Proposer
from mooncake_engine.execution.weights import ProgressHandler, load_weights
from mooncake_engine.models.catalog import Model, build_model
from mooncake_engine.models.layers import Placement, Span
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.plan import (
    AdmittedRequest,
    ScheduledSequence,
    StepPlan,
)
from mooncake_engine.text.grammars import vocabulary_in
from mooncake_hal.backend import Backend

_WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True)
class RankHandlers:
    """Where a rank reports to; all may be called from any thread.

    Args:
        progress: told while weights are read.
        emit: takes the extension's messages.
        fail: takes what killed one of the extension's threads.
    """

    progress: ProgressHandler | None
    emit: Callable[[bytes], None]
    fail: Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class _Ground:
    """What a rank runs on: device ``index`` of ``backend``, among other ranks."""

    config: EngineConfig
    backend: Backend
    index: int
    groups: RankGroups

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.backend.runtime.device(self.index)

    def placement(self, setup: ExecutionSetup) -> Placement:
        """Where the rank's share of the model goes."""
        shard = self.groups.place.shard(setup.geometry)
        layers = Span(shard.layer_start, shard.layer_stop)
        communicator = self.groups.stage
        where = (self.backend.ops, self.device, setup.dtype, communicator)
        return Placement(*where, layers, setup.kv_scales, setup.has_resident_latents)


class Worker:
    """A loaded rank.

    Args:
        config: the instance's.
        setup: what all ranks share.
        backend: the rank's hardware.
        groups: those that it belongs to. The worker closes them.
        extension: name of an ExtensionFactory, or None.
        handlers: where it reports to.

    Raises:
        CheckpointError, ConfigError, OutOfMemory: the model can't be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        setup: ExecutionSetup,
        backend: Backend,
        groups: RankGroups,
        *,
        extension: str | None,
        handlers: RankHandlers,
    ) -> None:
        rank = groups.place.rank
        index = rank_device(config, list(backend.runtime.devices()), rank)
        backend.runtime.bind_thread(index)
        self._ground = _Ground(config, backend, index, groups)
        placement = self._ground.placement(setup)
        self._model = model = build_model(setup.model, placement, setup.max_model_len)
        load_weights(model, config.model, handlers.progress)
        self._graphs: list[ReplayedStage[Any]] = []
        self._draft = self._load_draft(setup, handlers.progress)
        stage = ModelStage(model, placement, setup.model.hidden_size, groups.pipeline)
        self._setup = self._measured(setup, stage) if setup.is_provisional else setup
        self.pool, self._runner = self._build_runner(self._setup, stage)
        self.extension: WorkerExtension | None = None
        if extension is not None:
            where = (rank, config.num_ranks, index, self.pool)
            whom = (backend, config, handlers.emit, handlers.fail)
            self.extension = load_extension(extension)(ExtensionContext(*where, *whom))

    def _measured(self, setup: ExecutionSetup, model: ModelStage) -> ExecutionSetup:
        """The final setup: KV gets what the largest step leaves free on every rank."""
        ground = self._ground
        config, runtime, index = ground.config, ground.backend.runtime, ground.index
        pool, runner = self._build_runner(setup, model)
        try:
            peak_bytes = measure_peak(runner, largest_steps(config, setup), runtime, index)
        finally:
            runner.close()
            del runner
            pool.close()
        nbytes, size = memory_for_kv(config, runtime, index, peak_bytes), setup.pool_size
        shards = [ground.groups.place.shard(geometry) for geometry in setup.geometries]
        num_blocks = blocks_in(nbytes, block_bytes(setup.geometries, shards, size.block_size))
        num_blocks = ground.groups.least(num_blocks, ground.device)
        return resize(config, setup, num_blocks - size.num_scratch_blocks)

    def _build_runner(self, setup: ExecutionSetup, model: ModelStage) -> tuple[KVPool, ModelRunner]:
        ground = self._ground
        config, backend, index = ground.config, ground.backend, ground.index
        shard = ground.groups.place.shard(setup.geometry)
        size, layout_name = setup.pool_size, setup.layout_name
        pool = KVPool(backend, index, setup.geometry, shard, size, layout_name=layout_name)
        facts, device = setup.model, ground.device
        vocabulary = partial(vocabulary_in, config.model, facts.vocab_size, facts.eos_token_ids)
        requests = RequestTable(
            config.max_num_seqs,
            setup.max_blocks,
            facts.vocab_size,
            device,
            vocabulary,
            is_sampling=ground.groups.place.is_last_stage,
        )
        num_host_blocks = 0 if setup.is_provisional else size.num_host_blocks
        mover = BlockMover(pool, num_host_blocks, backend.ops, device)
        sampler = Sampler(facts.eos_token_ids, sampling_ops(backend))
        stage = model if setup.is_provisional else self._with_graphs(model, pool)
        make_event = partial(backend.runtime.event, index)
        has_peers = config.kv_transfer is not None
        parts = RunnerParts(stage, pool, requests, sampler, mover, make_event, has_peers)
        if config.feeds_forward:
            feed = TokenFeed(config.max_num_seqs, device, config.steps_in_flight)
            return pool, FeedForwardRunner(parts, feed)
        return pool, ModelRunner(parts, self._build_proposer(setup, requests, sampler))

    def _with_graphs(self, stage: Stage, pool: KVPool) -> Stage:
        """The stage whose steps are replayed, as far as they are captured."""
        ground, setup = self._ground, self._setup
        runtime = ground.backend.runtime
        if sizes := setup.graphs.decode_sizes:
            stage = DecodeGraphs(stage, pool, runtime, sizes, setup.max_blocks)
            self._graphs.append(stage)
        if sizes := setup.graphs.piecewise_sizes:
            where = (ground.placement(setup), pool, runtime)
            stage = PiecewiseGraphs(stage, self._model, *where, sizes=sizes)
            self._graphs.append(stage)
        return stage

    def _load_draft(self, setup: ExecutionSetup, progress: ProgressHandler | None) -> Model | None:
        """The draft model, on the same ranks as the model."""
        ground, draft = self._ground, setup.draft
        speculation = ground.config.speculation
        if draft is None or speculation is None or speculation.model is None:
            return None
        placement = Placement(ground.backend.ops, ground.device, setup.dtype, ground.groups.stage)
        model = build_model(draft.model, placement, draft.max_positions)
        load_weights(model, speculation.model, progress)
        return model

    def _build_proposer(
        self, setup: ExecutionSetup, requests: RequestTable, sampler: Sampler
    ) -> Proposer | None:
        ground, speculation = self._ground, self._ground.config.speculation
        if speculation is None:
            return None
        if setup.draft is None or self._draft is None:
            return NGramProposer(*speculation.prompt_lookup)
        geometry = setup.draft.geometry
        pool = KVPool(
            ground.backend,
            ground.index,
            geometry,
            ground.groups.place.shard(geometry),
            setup.pool_size,
            layout_name=setup.layout_name,
        )
        max_tokens = ground.config.max_num_batched_tokens
        draft = DraftModel(self._draft, pool, max_tokens, setup.draft.max_positions)
        return DraftModelProposer(draft, requests.tables, sampler)

    def bind_thread(self) -> None:
        """Make the rank's device current in the calling thread, which launches steps or waits for
        their ends; that which loaded the rank has it."""
        self._ground.backend.runtime.bind_thread(self._ground.index)

    def launch(
        self, plan: StepPlan, sampled: Mapping[str, Sequence[int]] | None = None
    ) -> PendingStep:
        """Run one step, behind those that were launched before.

        Args:
            plan: the step.
            sampled: token ids by request, of earlier steps; the last stage knows them.
        """
        if sampled and not self._ground.groups.place.is_last_stage:
            self._runner.learn(sampled)
        layer_done = self.extension.begin_step(plan) if self.extension else None
        return self._runner.launch(plan, layer_done)

    def warm_up(self) -> None:
        """Compile and capture whatever the first requests would have to wait for."""
        self._run_once()
        is_own_memory = self._ground.device.type != "cpu"  # of which KV leaves just what is needed
        for graphs in self._graphs if is_own_memory else ():
            graphs.capture()

    def _run_once(self) -> None:
        """A prompt and a decode, into block 0, which no request holds yet."""
        room = min(self._setup.pool_size.block_size, self._setup.max_model_len)
        speculation = self._ground.config.speculation
        most_guesses = speculation.num_speculative_tokens if speculation else 0
        num_guesses = min(most_guesses, max(room - 2, 0))
        length = room - 1 - num_guesses
        if length < 1:
            return
        sampling = SamplingParams(temperature=0.0)
        admitted = AdmittedRequest(_WARM_UP, (0,) * length, length, sampling, 0, (0,))
        prompt = ScheduledSequence(_WARM_UP, 0, length)
        decode = ScheduledSequence(_WARM_UP, length, 1, num_guesses=num_guesses)
        self._runner.run(StepPlan(0, admitted=(admitted,), sequences=(prompt,)))
        if not self._ground.groups.place.is_last_stage:
            self._runner.learn({_WARM_UP: (0,)})
        self._runner.run(StepPlan(0, sequences=(decode,)))
        self._runner.run(StepPlan(0, retired=(_WARM_UP,)))

    def drain(self) -> None:
        """Wait for the other stages to be through with all steps; before an orderly close."""
        self._ground.groups.drain()

    def close(self) -> None:
        """Stop the extension, leave the groups, free the KV. Idempotent."""
        if self.extension is not None:
            self.extension.close()
        self._ground.groups.close()
        self._runner.close()
        self.pool.close()
