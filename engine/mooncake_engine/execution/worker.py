"""The worker of one rank: loads the model, owns the KV cache and runs steps.

Its owner is ``InProcessExecutor``, or ``rank_process`` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mooncake_engine.core_messages import ProgressHandler
from mooncake_engine.execution.async_model_runner import AsyncModelRunner, SampledTokenBuffer
from mooncake_engine.execution.engine_plan import EnginePlan, block_bytes, rank_device
from mooncake_engine.execution.expert_balancer import ExpertBalancer
from mooncake_engine.execution.graph_runners import (
    DecodeGraphRunner,
    PiecewiseGraphRunner,
)
from mooncake_engine.execution.memory_profiling import (
    largest_steps,
    measure_peak,
    memory_for_kv,
    profiling_kv_cache_size,
)
from mooncake_engine.execution.model_runner import ModelRunner, PendingStep, RunnerParts
from mooncake_engine.execution.parallel_state import ParallelGroups, PipelineStage, StageRunner
from mooncake_engine.execution.request_table import RequestTable
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.execution.sampling_metadata import sampling_ops
from mooncake_engine.execution.speculation.draft_model import DraftModel, DraftModelProposer
from mooncake_engine.execution.speculation.drafts import Proposer
from mooncake_engine.execution.speculation.ngram import NGramProposer
from mooncake_engine.execution.warm_up import WARM_UP, copy_steps, warm_up_requests
from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.execution.worker_extension import (
    ExtensionContext,
    WorkerExtension,
    load_extension,
)
from mooncake_engine.kv_cache.block_copier import BlockCopier
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize, blocks_in
from mooncake_engine.messages import ExpertLoad, WaitedSeconds
from mooncake_engine.models.catalog import Model, build_model
from mooncake_engine.models.expert_placement import ExpertRanks, imbalance
from mooncake_engine.models.fp8_weights import Fp8Linears
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.layers import LinearQuantization, ParallelContext, Span
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.step_plan import ExpertRound, StepPlan
from mooncake_engine.text.grammars import Vocabulary, vocabulary_in
from mooncake_hal.backend import Backend
from mooncake_hal.kv.geometry import KVGeometry
from mooncake_hal.registry import Registry


@dataclass(frozen=True, slots=True)
class RankHandlers:
    """The callbacks of a rank. It may call them from any thread.

    Args:
        progress: called while weights are read, with the bytes so far.
        emit: called with each message of the extension.
        fail: called with the exception that ended one of the extension's threads.
        await_other_ranks: called when the weights are loaded; returns when all ranks have loaded
            theirs, which may take some of them minutes longer than others, and a collective is not
            given that time.
    """

    progress: ProgressHandler | None
    emit: Callable[[bytes], None]
    fail: Callable[[BaseException], None]
    await_other_ranks: Callable[[], None] = lambda: None


class Worker:
    """One loaded rank: its part of the model, its KV cache and its model runner.

    Args:
        plan: the instance's plan.
        backend: the backend of the rank's device.
        groups: the communication groups of the rank. The worker closes them.
        registry: where the extension looks up transports.
        extension: name of an ExtensionFactory, or None.
        handlers: the callbacks of the rank.

    Raises:
        CheckpointError, ConfigError, OutOfMemory: the model can't be loaded.
    """

    def __init__(
        self,
        plan: EnginePlan,
        backend: Backend,
        groups: ParallelGroups,
        *,
        registry: Registry,
        extension: str | None,
        handlers: RankHandlers,
    ) -> None:
        self._backend = backend
        self._groups = groups
        self._device_index = rank_device(
            plan.config, list(backend.runtime.devices()), groups.info.number
        )
        self.bind_thread()
        self._device = backend.runtime.device(self._device_index)
        self._parallel = self._parallel_context(plan)
        self._model = build_model(plan.model, self._parallel, plan.max_model_len)
        load_weights(self._model, plan.config.model, handlers.progress)
        self._draft_model = self._load_draft_model(plan, handlers.progress)
        handlers.await_other_ranks()
        self._stage = PipelineStage(
            self._model, self._parallel, plan.model.hidden_size, groups.pipeline
        )
        self._plan = plan
        if plan.kv_cache_size is None:
            plan = plan.with_blocks(self._measure_num_blocks(plan))
        assert plan.kv_cache_size is not None, "a plan with blocks has the size of its KV cache"
        self._plan = plan
        self.pool = self._make_kv_cache(plan, plan.geometry, plan.kv_cache_size)
        self._graphs = self._make_graph_runners(plan, self.pool)
        stage = self._graphs[-1] if self._graphs else self._stage
        self._runner = self._make_runner(plan, self.pool, plan.kv_cache_size, stage)
        self._balancer = self._make_balancer(plan)
        self.extension: WorkerExtension | None = None
        if extension is not None:
            context = ExtensionContext(
                rank=groups.info.rank,
                num_ranks=plan.config.num_ranks,
                device=self._device_index,
                pool=self.pool,
                backend=backend,
                registry=registry,
                config=plan.config,
                emit=handlers.emit,
                fail=handlers.fail,
            )
            self.extension = load_extension(extension)(context)

    def _parallel_context(self, plan: EnginePlan) -> ParallelContext:
        """The share of the model that this rank holds, and the device that holds it."""
        shard = self._groups.info.shard(plan.geometry)
        fused = self._groups.fused_experts
        return ParallelContext(
            self._backend.ops,
            self._device,
            plan.dtype,
            communicator=self._groups.stage,
            layers=Span(shard.layer_start, shard.layer_stop),
            kv_scales=plan.kv_scales,
            has_native_latents=plan.has_native_latents,
            ep_size=plan.config.ep_size,
            ep_dispatch_min_tokens=plan.config.ep_dispatch_min_tokens,
            expert_slots=plan.expert_slots,
            expert_communicator=self._groups.experts,
            fused_experts=fused,
            fused_max_tokens=(
                0 if fused is None else self._groups.least(fused.max_tokens, self._device)
            ),
            quantization=_linear_quantization(plan.model, plan),
            fused_rope_writes=self._backend.capabilities.fused_rope_writes,
        )

    def _make_balancer(self, plan: EnginePlan) -> ExpertBalancer | None:
        """The balancer that moves experts between ranks; None if the plan asks for none."""
        interval, moe = plan.config.eplb_step_interval, plan.model.moe
        if not interval or moe is None or not self._model.expert_counts:
            return None
        over = ExpertRanks(plan.config.ep_size, groups=moe.routing.groups)
        return ExpertBalancer(self._model, self._parallel, over, interval)

    def _load_draft_model(self, plan: EnginePlan, progress: ProgressHandler | None) -> Model | None:
        """Load the draft model, sharded over the same ranks as the model."""
        draft, speculation = plan.draft, plan.config.speculation
        if draft is None or speculation is None or speculation.model is None:
            return None
        parallel = ParallelContext(
            self._backend.ops,
            self._device,
            plan.dtype,
            self._groups.stage,
            quantization=_linear_quantization(draft.model, plan),
            fused_rope_writes=self._backend.capabilities.fused_rope_writes,
        )
        model = build_model(draft.model, parallel, draft.max_positions)
        load_weights(model, speculation.model, progress)
        return model

    def _measure_num_blocks(self, plan: EnginePlan) -> int:
        """The number of KV blocks that fit into the memory that the largest step and the captured
        graphs leave free: the minimum over all ranks.

        The largest step runs eagerly over a pool of just the blocks that it needs, with its tokens
        routed to the experts that take the most memory. The graphs are captured over the same pool
        to measure them, and captured again over the real pool.
        """
        size = profiling_kv_cache_size(plan)
        runtime, index = self._backend.runtime, self._device_index
        pool = self._make_kv_cache(plan, plan.geometry, size)
        runner = self._make_runner(plan, pool, size, self._stage)
        graphs = self._make_graph_runners(plan, pool)
        try:
            steps = [self._with_round(step) for step in largest_steps(plan)]
            with self._model.worst_routing():
                peak_bytes = measure_peak(runner, steps, graphs, runtime, index)
            nbytes = memory_for_kv(plan.config, runtime, index, peak_bytes)
        finally:
            runner.close()
            del runner, graphs
            pool.close()
            runtime.reset_peak(index)  # which also frees the memory of the captured graphs
        shards = [self._groups.info.shard(geometry) for geometry in plan.geometries]
        num_blocks = blocks_in(nbytes, block_bytes(plan.geometries, shards, size.block_size))
        return self._groups.least(num_blocks, self._device) - size.num_scratch_blocks

    def _make_kv_cache(
        self, plan: EnginePlan, geometry: KVGeometry, size: KVCacheSize
    ) -> KVCacheMemory:
        """Allocate a pool for this rank's shard of a model's KV."""
        shard = self._groups.info.shard(geometry)
        layout = plan.layout_name
        return KVCacheMemory(
            self._backend, self._device_index, geometry, shard, size, layout_name=layout
        )

    def _make_graph_runners(
        self, plan: EnginePlan, pool: KVCacheMemory
    ) -> list[DecodeGraphRunner | PiecewiseGraphRunner]:
        """The graph runners as a chain: the first wraps the stage, each next one wraps the one
        before it, and the last is the one to call."""
        runtime, graphs = self._backend.runtime, plan.graphs
        runners: list[DecodeGraphRunner | PiecewiseGraphRunner] = []
        stage: StageRunner = self._stage
        if graphs.decode_sizes:
            decode = DecodeGraphRunner(stage, pool, runtime, graphs.decode_sizes, plan.max_blocks)
            runners.append(decode)
            stage = decode
        if graphs.piecewise_sizes:
            runners.append(
                PiecewiseGraphRunner(
                    stage,
                    self._model,
                    self._parallel,
                    pool,
                    runtime,
                    sizes=graphs.piecewise_sizes,
                    hidden_size=plan.model.hidden_size,
                )
            )
        return runners

    def _find_vocabulary(self) -> Vocabulary:
        model = self._plan.model
        config = self._plan.config
        eos = model.eos_token_ids
        return vocabulary_in(config.model, model.vocab_size, eos, config.chat_template)

    def _make_runner(
        self, plan: EnginePlan, pool: KVCacheMemory, size: KVCacheSize, stage: StageRunner
    ) -> ModelRunner:
        """Make the model runner that runs step plans over a pool.

        Args:
            plan: the instance's plan.
            pool: the KV cache.
            size: size of the pool; the draft model's pool gets as many blocks.
            stage: runs this rank's part of the model.
        """
        config, model, backend = plan.config, plan.model, self._backend
        requests = RequestTable(
            config.max_num_seqs,
            plan.max_blocks,
            model.vocab_size,
            self._device,
            self._find_vocabulary,
            is_sampling=self._groups.info.is_last_stage,
        )
        parts = RunnerParts(
            model=stage,
            pool=pool,
            requests=requests,
            sampler=Sampler(model.eos_token_ids, sampling_ops(backend)),
            copier=BlockCopier(
                pool,
                size.num_host_blocks,
                backend.ops,
                self._device,
                backend.runtime.copy_stream(self._device_index),
            ),
            make_event=partial(backend.runtime.event, self._device_index),
            has_peers=config.has_peers,
            serve_experts=self._model.serve_experts,
        )
        proposer = self._make_proposer(plan, parts, size)
        if not config.uses_async_scheduling:
            return ModelRunner(parts, proposer)
        sampled = SampledTokenBuffer(config.max_num_seqs, self._device, config.steps_in_flight)
        return AsyncModelRunner(parts, sampled, proposer)

    def _make_proposer(
        self, plan: EnginePlan, parts: RunnerParts, size: KVCacheSize
    ) -> Proposer | None:
        """The proposer of draft tokens; None without speculative decoding."""
        speculation = plan.config.speculation
        if speculation is None:
            return None
        if plan.draft is None or self._draft_model is None:
            return NGramProposer(*speculation.prompt_lookup)
        draft = DraftModel(
            self._draft_model,
            self._make_kv_cache(plan, plan.draft.geometry, size),
            plan.config.max_num_batched_tokens,
            plan.draft.max_positions,
        )
        return DraftModelProposer(draft, parts.requests.tables, parts.sampler)

    @property
    def steps_in_flight(self) -> int:
        """The most steps that may be in flight at once."""
        return self._plan.config.steps_in_flight

    def bind_thread(self) -> None:
        """Make the rank's device current in the calling thread. Each thread that launches steps or
        waits for them calls this first, except the one that constructed the worker."""
        self._backend.runtime.bind_thread(self._device_index)

    def launch(
        self, plan: StepPlan, sampled: Mapping[str, Sequence[int]] | None = None
    ) -> PendingStep:
        """Launch one step after those that were launched before.

        Args:
            plan: the step.
            sampled: token ids by request that the last stage sampled in earlier steps; the last
                stage itself ignores them.
        """
        if sampled and not self._groups.info.is_last_stage:
            self._runner.append_sampled(sampled)
        if self._balancer is not None:
            self._balancer.before(plan)
        layer_done = self.extension.begin_step(plan) if self.extension else None
        return self._runner.launch(plan, layer_done)

    def expert_load(self) -> ExpertLoad | None:
        """The load of the experts in this rank's layers; None if experts are not divided over
        ranks. Any thread; waits for the device."""
        if not self._model.expert_counts:
            return None
        by_layer, ep_size = self._model.expert_counts, self._plan.config.ep_size
        balances = [
            imbalance(counts.placed_tokens, counts.slots, ep_size) for counts in by_layer.values()
        ]
        return ExpertLoad(
            {layer: counts.tokens for layer, counts in by_layer.items()},
            sum(balances) / len(balances),
            sum(counts.num_sent_rows for counts in by_layer.values()),
            0 if self._balancer is None else self._balancer.num_placements,
            sum(counts.num_moved for counts in by_layer.values()),
        )

    def waited_s(self) -> WaitedSeconds:
        """Seconds that this rank's host has waited for other ranks, by group and collective."""
        groups = self._groups
        named = {"stage": groups.stage, "pipeline": groups.pipeline, "experts": groups.experts}
        return {name: dict(group.waited_s) for name, group in named.items() if group is not None}

    def prepare_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar before the first request with it arrives. Any thread, while steps run.

        Raises:
            EngineError: the grammar is invalid, or the model has no tokenizer for it.
        """
        if self._groups.info.is_last_stage:
            self._find_vocabulary().matcher(grammar)

    def warm_up(self) -> None:
        """Compile kernels and capture graphs, so that the first requests don't wait for that."""
        # on a device of its own, the KV cache leaves just as much memory as profiling has measured
        is_own_memory = self._device.type != "cpu"
        size = self._plan.kv_cache_size
        assert size is not None, "a rank that runs has a pool"
        for prompt, decode in warm_up_requests(self._plan, size.num_blocks, compiles=is_own_memory):
            self._runner.run(self._with_round(prompt))
            if not self._groups.info.is_last_stage:
                self._runner.append_sampled({WARM_UP: (0,)})
            self._runner.run(self._with_round(decode))
            begun = (*prompt.new_requests, *decode.new_requests)
            self._runner.run(StepPlan(0, removed=tuple(new.request_id for new in begun)))
        for copies in copy_steps(size.num_host_blocks) if is_own_memory else ():
            self._runner.run(copies)
        for graphs in self._graphs if is_own_memory else ():
            graphs.capture()

    def _with_round(self, step: StepPlan) -> StepPlan:
        """Add the round of a step that every data-parallel rank runs at once."""
        if self._groups.experts is None:
            return step
        least = self._plan.config.ep_dispatch_min_tokens
        steps = [step] * self._groups.info.dp_size
        return replace(step, expert_round=ExpertRound.of(steps, least))

    def drain(self) -> None:
        """Wait until the other stages have finished all steps. Call before an orderly close."""
        self._groups.drain()

    def close(self) -> None:
        """Stop the extension, leave the groups and free the KV cache. Idempotent."""
        if self.extension is not None:
            self.extension.close()
        self._groups.close()
        self._runner.close()
        self.pool.close()


def _linear_quantization(model: ModelConfig, plan: EnginePlan) -> LinearQuantization | None:
    """How a model's linear layers and experts are quantised; None if they hold unquantised or
    dequantised weights."""
    if model.quantization is None or not plan.has_fp8_linears:
        return None
    return Fp8Linears(model.quantization, keeps_experts=plan.keeps_fp8_experts(model))
