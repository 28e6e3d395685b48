"""The connectors that vLLM's configuration names: vLLM's interface, and a guard on every hook.

What vLLM calls must not raise: in its scheduler an exception would end the engine for everybody,
in a worker, too. So an unexpected error is logged with its trace and counted, and the request
goes on without a hand-over. Only a connector that can't go on at all is allowed to end the engine.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_events import (
    BlockRemoved as VllmBlockRemoved,
    BlockStored as VllmBlockStored,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform

from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import PushStep
from mooncake_kv.kv_events import BlockRemoved, BlockStored, KVEvent
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_vllm.ascend_memory import HEADS_FIRST, check_ascend, view_ascend_caches
from mooncake_vllm.errors import ConnectorDied, UnsupportedByVllmConnector
from mooncake_vllm.transfer_stats import POOL, Differences, HalPromMetrics, HalStats
from mooncake_vllm.vllm_instance import (
    check_supported,
    describe_device,
    describe_instance,
    model_kv,
    npu_formats,
    rank_position,
    rope_turner,
    steps_may_wait,
    worker_sockets,
)
from mooncake_vllm.vllm_interface import BlockPool, KVCacheBlocks, Request
from mooncake_vllm.vllm_memory import view_caches
from mooncake_vllm.vllm_pages import page_format
from mooncake_vllm.vllm_pool_side import POOL_WORKER, PoolSchedulerSide
from mooncake_vllm.vllm_scheduler_side import Instance, SchedulerHooks, SchedulerSide
from mooncake_vllm.vllm_settings import (
    of_data_parallel_rank,
    read_pool_settings,
    read_settings,
    wanted_layout,
)
from mooncake_vllm.vllm_worker_side import (
    IDLE_WAIT_S,
    StepWait,
    WorkerKind,
    WorkerSide,
    connector_worker,
)

logger = logging.getLogger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])
STEP_WAITS: WeakValueDictionary[str, StepWait] = WeakValueDictionary()
"""Of this process's rank, by vLLM's instance: MultiConnector's children, of whom it tells one
another nothing, find the one that they have in common."""


def guarded(instead: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """A hook whose errors are logged and counted.

    Args:
        instead: makes what the hook returns then.
    """

    def guard(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: HalConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except ConnectorDied:
                raise
            except Exception:
                self.num_errors += 1
                logger.exception("%s.%s failed", type(self).__name__, hook.__name__)
                return instead()

        return cast(Hook, call)

    return guard


def _log_as_vllm_does() -> None:
    """vLLM sets its own logger up and no other: what ours say below WARNING would be lost."""
    vllm = logging.getLogger("vllm")
    for name in ("mooncake_hal", "mooncake_kv", "mooncake_vllm"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers, ours.propagate = list(vllm.handlers), False
            ours.setLevel(vllm.level)


def step_wait(vllm_config: Any) -> StepWait:
    """The one that all connectors of an instance's rank have in common."""
    wait = STEP_WAITS.get(vllm_config.instance_id)
    if wait is None:
        wait = StepWait(vllm_config.max_concurrent_batches - 1)
        STEP_WAITS[vllm_config.instance_id] = wait
    return wait


def _data_parallel_rank(vllm_config: Any) -> int:
    """Of this instance; ``data_parallel_rank`` is 0 in all that share no experts."""
    return int(vllm_config.parallel_config.data_parallel_index)


def _nothing() -> None:
    """What most hooks return."""


def _as_vllm_event(event: KVEvent) -> object:
    """One of a store's as vLLM publishes its own; its blocks are the store's chunks."""
    if isinstance(event, BlockStored):
        return VllmBlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=None,
            extra_keys=[keys and tuple(keys) for keys in event.extra_keys or ()] or None,
        )
    assert isinstance(event, BlockRemoved), event
    return VllmBlockRemoved(block_hashes=event.block_hashes, medium=event.medium)


@dataclass
class HalStepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is Any where types are
    """Scheduler to workers, with a step.

    Args:
        loads: those whose blocks it allocated.
        pushes: what it computes of prompts that are sent.
        waits: whether it computes nothing, and vLLM is to be told of a load or of blocks.
        held: requests that have ended since the step before, and whose blocks stay until a report.
    """

    loads: tuple[str, ...] = ()
    pushes: tuple[PushStep, ...] = ()
    waits: bool = False
    held: tuple[str, ...] = ()


class HalConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """What both connectors have in common. One class, two kinds of objects: ``role`` says which."""

    connector_name: str
    """The connector of ``mooncake_kv``."""
    best_layout: str | None = None
    """The KV cache layout that makes its transfers few and long; None: none does."""
    is_pool = False
    """Whether its figures are the pool's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self.num_errors = 0
        self._held: list[str] = []  # since the last step's metadata
        self._may_wait = steps_may_wait(vllm_config)
        self._names_layers = not vllm_config.parallel_config.use_ubatching
        self._differences = Differences()
        self._config = self._read_settings(vllm_config)
        check_supported(vllm_config, kv_cache_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerHooks | None = None
        if role == KVConnectorRole.SCHEDULER:
            sockets = worker_sockets(vllm_config, type(self).__name__)
            self._scheduler = self._make_scheduler(describe_instance(vllm_config), sockets)

    def _make_scheduler(self, instance: Instance, sockets: list[Path]) -> SchedulerHooks:
        return SchedulerSide(self._config, instance, sockets)

    def _worker_kind(self) -> WorkerKind:
        return connector_worker(self._config.connector)

    @classmethod
    def _read_settings(cls, vllm_config: Any) -> KVTransferConfig:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return read_settings(extra, cls.connector_name, _data_parallel_rank(vllm_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Asked for where it pays: on GPUs, whose attention takes any order (vLLM's on a CPU takes
        one, vLLM-Ascend has its own), and where a token's KV has heads, which ranks share out."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        pays = current_platform.device_type == "cuda" and not vllm_config.model_config.use_mla
        return wanted_layout(extra, cls.best_layout if pays else None)

    # ------------------------------------------------------------- scheduler

    @guarded(_nothing)
    def on_new_request(self, request: Request) -> None:
        self._at_scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._at_scheduler.num_to_load(request, num_computed_tokens)
        return count, bool(count)

    @guarded(_nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._at_scheduler.blocks_allocated(request, blocks, num_external_tokens)

    @guarded(HalStepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        side = self._at_scheduler
        is_idle = not scheduler_output.num_scheduled_tokens
        waits = self._may_wait and is_idle and side.is_waiting
        pushes, started = side.push_steps(scheduler_output), side.take_started()
        held, self._held = tuple(self._held), []  # last: after an error the next step names them
        return HalStepMetadata(started, pushes, waits, held)

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request, block_ids)

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """What is stored is out of date: vLLM gets other weights, or is told to forget."""
        return self._at_scheduler.reset_cache()

    @guarded(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._at_scheduler.bind_block_pool(gpu_block_pool)

    @guarded(tuple)
    def take_events(self) -> Sequence[object]:
        """What a store in this instance holds now, for vLLM to publish beside its own blocks."""
        return [_as_vllm_event(event) for event in self._at_scheduler.take_events()]

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    # ------------------------------------------------------------- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Errors are let out: an instance that can't hand its KV over doesn't start."""
        groups, model = self._kv_cache_config.kv_cache_groups, self._vllm_config.model_config
        stage, ranks = get_pp_group(), get_tp_group()
        first = next(iter(kv_caches.values()))
        is_split = isinstance(first, tuple | list)  # vLLM-Ascend has K and V apart
        index = (first[0] if is_split else first).device.index
        device = describe_device(current_platform, index)
        position = rank_position(ranks.rank_in_group, ranks.world_size, device, index)
        num_blocks, kv = self._kv_cache_config.num_blocks, model_kv(model, groups)
        turn_rope = None  # on Ascend a vendor's op decides how they lie
        if is_split:
            check_ascend(self._vllm_config.additional_config, npu_formats(kv_caches))
            heads_first = os.environ.get("VLLM_KV_CACHE_LAYOUT") in HEADS_FIRST
            view = view_ascend_caches(kv_caches, kv, position, num_blocks, heads_first=heads_first)
        else:
            layers = self._vllm_config.compilation_config.static_forward_context
            named = {name: layers[name] for name in kv_caches}
            packing = page_format(device.kind, named, kv_caches, kv.plane_dims)
            view = view_caches(kv_caches, kv, position, num_blocks, packing)
            turn_rope = rope_turner(kv_caches, kv)
        rank = stage.rank_in_group * ranks.world_size + ranks.rank_in_group
        path = worker_sockets(self._vllm_config, type(self).__name__)[rank]
        wait = step_wait(self._vllm_config)
        self._worker = WorkerSide(
            self._config, rank, path, view, device, self._worker_kind(), wait, turn_rope
        )

    @guarded(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Loads begin here, before the step's forward, unless the step zeroes new blocks first."""
        super().bind_connector_metadata(connector_metadata)
        # other connectors' metadata come while a graph is captured
        if self._worker is not None and isinstance(connector_metadata, HalStepMetadata):
            wait_s = IDLE_WAIT_S if connector_metadata.waits else 0.0
            self._worker.begin_step(connector_metadata.pushes, connector_metadata.held, wait_s)
        if not self._zeroes_blocks:
            self._release(connector_metadata)

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._zeroes_blocks and self.has_connector_metadata():
            self._release(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what a step reads is there before it is scheduled."""

    @guarded(_nothing)
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer that is pushed may leave now; one that no hook names, after the step."""
        self._layer_written(layer_name)

    @guarded(_nothing)
    def on_kv_cache_written(self, layer_name: str) -> None:
        """vLLM-Ascend's: before that layer's attention."""
        self._layer_written(layer_name)

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """Waits for nothing: blocks that are read or sent stay until a report."""
        if self._worker is not None:
            self._worker.end_step()

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_results()
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    # ------------------------------------------------------------- both

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> HalStats | None:
        """Of a rank, only the errors of its hooks; vLLM adds the ranks' and the scheduler's."""
        figures = {} if self._scheduler is None else self._scheduler.stats()
        figures[f"{POOL if self.is_pool else ''}hook_errors"] = float(self.num_errors)
        changed = self._differences.take(figures)
        return HalStats(data=changed) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HalStats:
        return HalStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HalPromMetrics:
        return HalPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, of_pool=cls.is_pool
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Registered memory can't be moved under peers that know where it is."""
        return False

    @guarded(_nothing)
    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @property
    def _at_scheduler(self) -> SchedulerHooks:
        assert self._scheduler is not None, "vLLM calls a worker's connector as a scheduler's"
        return self._scheduler

    def _finish(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_held, params = self._at_scheduler.request_finished(request, tables)
        if is_held:
            self._held.append(request.request_id)
        return is_held, params

    def _layer_written(self, layer_name: str) -> None:
        """Those that name no layer, as vLLM-Ascend's may, say nothing. With micro-batches each of
        them calls for each layer, and does not say which it is: all leave after the step."""
        if self._worker is not None and self._names_layers and layer_name:
            self._worker.layer_done(layer_name)

    @property
    def _zeroes_blocks(self) -> bool:
        return bool(self._kv_cache_config.needs_kv_cache_zeroing)

    def _release(self, metadata: KVConnectorMetadata) -> None:
        """Other connectors' metadata come while a graph is captured."""
        loads: Iterable[str] = getattr(metadata, "loads", ())
        if self._worker is not None:
            self._worker.release_loads(loads)


class HalPullConnector(HalConnector):
    """D reads a finished prompt's KV from P, under a lease; see ``mooncake_kv.pull_connector``."""

    connector_name = "MooncakeConnector"
    best_layout = "BHLNC"  # a block's heads that a rank has, of all layers, are one run


class HalPushConnector(HalConnector):
    """P writes into D's blocks, layer by layer; see ``mooncake_kv.push_connector``."""

    connector_name = "MooncakeLayerwiseConnector"
    best_layout = "LBHNC"  # layers leave one by one: of each, a block's heads are one run


# vLLM drops blocks that have left a sliding window only where its connector says that it knows of
# KV-cache groups. The pool's chunks have one block table, and nobody has tried it on an NPU.
if current_platform.device_type in ("cpu", "cuda"):
    for connector in (HalPullConnector, HalPushConnector):
        SupportsHMA.register(connector)


class HalPoolConnector(HalConnector):
    """What stores have of a prompt is loaded, what is computed is saved; see ``mooncake_kv.pool``.

    With a connector of the two above it goes into vLLM's MultiConnector, after it.
    """

    connector_name = "MooncakeConnector"  # whose addresses and transports it has
    is_pool = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if (kv_role := vllm_config.kv_transfer_config.kv_role) != "kv_both":
            raise UnsupportedByVllmConnector(
                f"HalPoolConnector loads and saves, its kv_role is {kv_role}: use kv_both, in a "
                "MultiConnector for that, too"
            )
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def _read_settings(cls, vllm_config: Any) -> KVTransferConfig:
        return cls._read_pool(vllm_config).network

    @classmethod
    def _read_pool(cls, vllm_config: Any) -> KVPoolConfig:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return read_pool_settings(extra, cls.connector_name, _data_parallel_rank(vllm_config))

    def _make_scheduler(self, instance: Instance, sockets: list[Path]) -> SchedulerHooks:
        published = self._vllm_config.kv_events_config
        return PoolSchedulerSide(
            of_data_parallel_rank(
                self._read_pool(self._vllm_config), _data_parallel_rank(self._vllm_config)
            ),
            instance,
            sockets,
            takes_events=published is not None and published.enable_kv_cache_events,
        )

    def _worker_kind(self) -> WorkerKind:
        return POOL_WORKER
