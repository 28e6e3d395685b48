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
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.request_state import RequestTable
from mooncake_engine.execution.runner import ModelRunner
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.execution.setup import ExecutionSetup, rank_device
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
from mooncake_hal.backend import Backend, Communicator, Ops
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
        self._setup = setup
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
        shard = shard_of(setup.geometry, config.tp_size, rank)
        self.pool = KVPool(
            backend, index, setup.geometry, shard, setup.pool_size, layout_name=setup.layout_name
        )
        self._runner = self._build_runner(config, model, backend.ops, device)
        self.extension: WorkerExtension | None = None
        if extension is not None:
            where = (rank, config.tp_size, index, self.pool)
            whom = (backend, config, handlers.emit, handlers.fail)
            self.extension = load_extension(extension)(ExtensionContext(*where, *whom))

    def _build_runner(
        self, config: EngineConfig, model: Model, ops: Ops, device: torch.device
    ) -> ModelRunner:
        facts = self._setup.model
        vocabulary = partial(vocabulary_in, config.model, facts.vocab_size, facts.eos_token_ids)
        requests = RequestTable(
            config.max_num_seqs, self._setup.max_blocks, facts.vocab_size, device, vocabulary
        )
        sampler = Sampler(facts.eos_token_ids)
        mover = BlockMover(self.pool, self._setup.pool_size.num_host_blocks, ops, device)
        return ModelRunner(model, self.pool, requests, sampler, mover, device)

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
