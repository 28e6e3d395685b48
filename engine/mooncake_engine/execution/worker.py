"""One rank of an instance: its model, its KV pool, and the extension beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.block_mover import BlockMover
from mooncake_engine.execution.extension import (
    ExtensionContext,
    WorkerExtension,
    load_extension,
)
from mooncake_engine.execution.kv_pool import KVPool, blocks_in
from mooncake_engine.execution.profiling import largest_step, measure_peak, memory_for_kv
from mooncake_engine.execution.request_state import RequestTable
from mooncake_engine.execution.runner import ModelRunner
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.execution.setup import ExecutionSetup, rank_device, resize
from mooncake_engine.execution.weights import ProgressHandler, load_weights
from mooncake_engine.models.catalog import Model, build_model
from mooncake_engine.models.layers import Placement
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.plan import (
    AdmittedRequest,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from mooncake_engine.text.grammars import vocabulary_in
from mooncake_hal.backend import Backend, Communicator
from mooncake_hal.kv.geometry import shard_of

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
class _Place:
    """Where a rank runs: on device ``index`` of ``backend``."""

    config: EngineConfig
    backend: Backend
    index: int
    rank: int


class Worker:
    """A loaded rank.

    Args:
        config: the instance's.
        setup: what all ranks share.
        backend: the rank's hardware.
        communicator: its group, None for a rank alone. The worker closes it.
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
        communicator: Communicator | None,
        *,
        extension: str | None,
        handlers: RankHandlers,
    ) -> None:
        self._communicator = communicator
        rank = communicator.rank if communicator else 0
        index = rank_device(config, list(backend.runtime.devices()), rank)
        backend.runtime.bind_thread(index)
        device = backend.runtime.device(index)
        model = build_model(
            setup.model,
            Placement(backend.ops, device, setup.dtype, communicator),
            setup.max_model_len,
        )
        load_weights(model, config.model, handlers.progress)
        self._place = _Place(config, backend, index, rank)
        self._setup = self._measured(setup, model) if setup.is_provisional else setup
        self.pool, self._runner = self._build_runner(self._setup, model)
        self.extension: WorkerExtension | None = None
        if extension is not None:
            where = (rank, config.tp_size, index, self.pool)
            whom = (backend, config, handlers.emit, handlers.fail)
            self.extension = load_extension(extension)(ExtensionContext(*where, *whom))

    def _measured(self, setup: ExecutionSetup, model: Model) -> ExecutionSetup:
        """The final setup: KV gets what the largest step leaves free on every rank."""
        config, runtime, index = self._place.config, self._place.backend.runtime, self._place.index
        pool, runner = self._build_runner(setup, model)
        try:
            peak_bytes = measure_peak(runner, largest_step(config, setup), runtime, index)
        finally:
            del runner
            pool.close()
        nbytes = memory_for_kv(config, runtime, index, peak_bytes)
        shards = [shard_of(setup.geometry, config.tp_size, r) for r in range(config.tp_size)]
        num_blocks = blocks_in(nbytes, config, setup.geometry, shards)
        return resize(config, setup, self._least(num_blocks))

    def _least(self, count: int) -> int:
        """The smallest of all ranks' counts."""
        if self._communicator is None:
            return count
        device = self._place.backend.runtime.device(self._place.index)
        mine = torch.tensor([count], dtype=torch.int64, device=device)
        return int(self._communicator.all_gather(mine).min())

    def _build_runner(self, setup: ExecutionSetup, model: Model) -> tuple[KVPool, ModelRunner]:
        config, backend, index = self._place.config, self._place.backend, self._place.index
        shard = shard_of(setup.geometry, config.tp_size, self._place.rank)
        size, layout_name = setup.pool_size, setup.layout_name
        pool = KVPool(backend, index, setup.geometry, shard, size, layout_name=layout_name)
        facts, device = setup.model, backend.runtime.device(index)
        vocabulary = partial(vocabulary_in, config.model, facts.vocab_size, facts.eos_token_ids)
        requests = RequestTable(
            config.max_num_seqs, setup.max_blocks, facts.vocab_size, device, vocabulary
        )
        num_host_blocks = 0 if setup.is_provisional else size.num_host_blocks
        mover = BlockMover(pool, num_host_blocks, backend.ops, device)
        sampler = Sampler(facts.eos_token_ids)
        return pool, ModelRunner(model, pool, requests, sampler, mover, device)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        layer_done = self.extension.begin_step(plan) if self.extension else None
        return self._runner.run(plan, layer_done)

    def warm_up(self) -> None:
        """Run a prompt and a decode once, so that the first request pays for no compilation.

        Writes into block 0, which no request holds yet.
        """
        length = min(self._setup.pool_size.block_size, self._setup.max_model_len) - 1
        if length < 1:
            return
        sampling = SamplingParams(temperature=0.0)
        admitted = AdmittedRequest(_WARM_UP, (0,) * length, length, sampling, 0, (0,))
        prompt = ScheduledSequence(_WARM_UP, 0, length)
        decode = ScheduledSequence(_WARM_UP, length, 1)
        self._runner.run(StepPlan(0, admitted=(admitted,), sequences=(prompt,)))
        self._runner.run(StepPlan(0, sequences=(decode,)))
        self._runner.run(StepPlan(0, retired=(_WARM_UP,)))

    def close(self) -> None:
        """Stop the extension, leave the group, free the KV. Idempotent."""
        if self.extension is not None:
            self.extension.close()
        if self._communicator is not None:
            self._communicator.close()
        self.pool.close()
