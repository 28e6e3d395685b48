"""The connectors that vLLM's configuration names: they implement vLLM's interface, and guard every
hook.

A hook must not raise: an exception in vLLM's scheduler or in a worker ends the engine for all
requests. So an unexpected error is logged with its traceback and counted, and the request continues
without KV transfer. Only a connector that can't continue at all may end the engine.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from vllm.config import get_current_vllm_config_or_none
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

from mooncake_hal.registry import ENTRY_POINT_GROUP
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import PushStep
from mooncake_kv.kv_events import BlockRemoved, BlockStored, KVEvent
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_vllm.ascend_memory import HEADS_FIRST, check_ascend, view_ascend_caches
from mooncake_vllm.errors import ConnectorDied, UnsupportedByVllmConnector
from mooncake_vllm.transfer_stats import POOL, HalPromMetrics, HalStats, MetricDeltas
from mooncake_vllm.vllm_instance import (
    check_outer_role,
    check_siblings,
    check_supported,
    describe_device,
    describe_instance,
    model_kv,
    npu_formats,
    rank_position,
    rope_order_converter,
    steps_may_wait,
    worker_sockets,
)
from mooncake_vllm.vllm_interface import BlockPool, KVCacheBlocks, Request
from mooncake_vllm.vllm_memory import view_caches
from mooncake_vllm.vllm_pages import page_format
from mooncake_vllm.vllm_pool_side import POOL_WORKER, PoolSchedulerSide
from mooncake_vllm.vllm_scheduler_base import Instance, SchedulerHooks
from mooncake_vllm.vllm_scheduler_side import SchedulerSide
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
"""The step wait of this process's rank, by vLLM's instance id. A MultiConnector does not introduce
its children to each other; they find the one that they share here."""


@dataclass
class PeerOffer:
    """The request for which a peer has the KV, if the latest one that vLLM has asked about is such
    a request. A MultiConnector takes the tokens of the first child that finds some, but asks all of
    them, and waits for as long as any of them looks for them."""

    request_id: str = ""


PEER_OFFERS: WeakValueDictionary[str, PeerOffer] = WeakValueDictionary()
"""The offer that the connectors of this process's scheduler share, as above."""


def guarded(fallback: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Decorate a hook so that its errors are logged and counted.

    Args:
        fallback: makes the value that the hook returns after an error.
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
                return fallback()

        return cast(Hook, call)

    return guard


def _log_as_vllm_does() -> None:
    """Give our loggers, and those of the plugins with transports, vLLM's handlers, or none if its
    messages go to the root logger's. vLLM configures only its own logger, so our messages below
    WARNING would be lost."""
    vllm = logging.getLogger("vllm")
    plugins = {point.module.partition(".")[0] for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in {"mooncake_hal", "mooncake_kv", "mooncake_vllm"} | plugins:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers, ours.propagate = list(vllm.handlers), vllm.propagate
            ours.setLevel(ours.level or vllm.level)


def step_wait(vllm_config: Any) -> StepWait:
    """Return the step wait that all connectors of a rank share, creating it if necessary."""
    wait = STEP_WAITS.get(vllm_config.instance_id)
    if wait is None:
        wait = StepWait(vllm_config.max_concurrent_batches - 1)
        STEP_WAITS[vllm_config.instance_id] = wait
    return wait


def _data_parallel_rank(vllm_config: Any) -> int:
    """This instance's data-parallel rank. vLLM's ``data_parallel_rank`` is 0 in all instances that
    share no experts."""
    return int(vllm_config.parallel_config.data_parallel_index)


def _return_none() -> None:
    """The ``fallback`` of hooks that return None."""


def _as_vllm_event(event: KVEvent) -> object:
    """Convert a store's event to vLLM's type; its blocks are the store's chunks."""
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
    """Metadata that the scheduler side sends to the workers with each step.

    Args:
        loads: names of the loads whose blocks were allocated for this step.
        pushes: the parts of pushed prompts that the step computes.
        waits: whether the step computes nothing while the end of a load, or the release of blocks,
            is still to be reported to vLLM.
        held: requests that have ended since the previous step, and whose blocks are held until a
            report.
    """

    loads: tuple[str, ...] = ()
    pushes: tuple[PushStep, ...] = ()
    waits: bool = False
    held: tuple[str, ...] = ()


class HalConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """Base class of the connectors. vLLM instantiates it for its scheduler and for each worker,
    as ``role`` says."""

    connector_name: str
    """Name of the connector in ``mooncake_kv``."""
    best_layout: str | None = None
    """The KV cache layout that makes its transfers few and large; None if none does."""
    is_pool = False
    """Whether its metrics are the pool's."""
    loads_wait_for_steps = True
    """Whether its loads begin after the steps that may still write to their blocks; see
    ``HeldLoads``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self.num_errors = 0
        self._held: list[str] = []  # requests to name in the next step's metadata
        self._may_wait = steps_may_wait(vllm_config)
        self._names_layers = not vllm_config.parallel_config.use_ubatching
        self._deltas = MetricDeltas()
        self._offer = PEER_OFFERS.setdefault(vllm_config.instance_id, PeerOffer())
        self._config = self._read_settings(vllm_config)
        check_supported(vllm_config, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            # vLLM has set it in its workers: a MultiConnector's child is given another one.
            outer = get_current_vllm_config_or_none()
            check_siblings(outer, type(self).__name__)
            if not self.loads_wait_for_steps:
                check_outer_role(vllm_config, outer)
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
        """Request ``best_layout`` where it helps: on GPUs, whose attention supports any layout
        (vLLM's CPU attention supports one, vLLM-Ascend has its own), and if a token's KV has heads
        that are divided among ranks, as it does without MLA."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        pays = current_platform.device_type == "cuda" and not vllm_config.model_config.use_mla
        return wanted_layout(extra, cls.best_layout if pays else None)

    # ------------------------------------------------------------- scheduler

    @guarded(_return_none)
    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)
        if not self.is_pool:
            self._offer.request_id = request.request_id if count else ""
        elif count is None and self._offer.request_id == request.request_id:
            count = 0  # nobody will ask for the stores' answer, unless the peer's KV does not come
        return count, bool(count)

    @guarded(_return_none)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not self.is_pool:
            self._offer.request_id = ""
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Called since vLLM 0.32, whose enum of sources is the type of the base's attribute."""
        sources = type(self._cache_hit_source)
        counts = self._scheduler_side.hit_sources(request, num_external_tokens)
        return {sources[name]: count for name, count in counts.items() if count}

    @guarded(HalStepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        side = self._scheduler_side
        is_idle = not scheduler_output.num_scheduled_tokens
        waits = self._may_wait and is_idle and (side.is_waiting or side.needs_steps)
        pushes, started = side.push_steps(scheduler_output), side.take_started()
        held, self._held = tuple(self._held), []  # last, so that after an error they are kept
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
        """Invalidate what was stored: vLLM's weights have changed, or its cache was reset."""
        return self._scheduler_side.reset_cache()

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keep vLLM stepping, even without requests or when it is paused."""
        return self._scheduler_side.needs_steps

    @guarded(_return_none)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler_side.bind_gpu_block_pool(gpu_block_pool)

    @guarded(tuple)
    def take_events(self) -> Sequence[object]:
        """The changes of this instance's own store, for vLLM to publish with its own events."""
        return [_as_vllm_event(event) for event in self._scheduler_side.take_events()]

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    # ------------------------------------------------------------- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Not guarded: an instance whose KV can't be transferred must not start."""
        groups, model = self._kv_cache_config.kv_cache_groups, self._vllm_config.model_config
        stage, ranks = get_pp_group(), get_tp_group()
        first = next(iter(kv_caches.values()))
        is_split = isinstance(first, tuple | list)  # vLLM-Ascend: K and V in separate tensors
        index = (first[0] if is_split else first).device.index
        device = describe_device(current_platform, index)
        position = rank_position(ranks.rank_in_group, ranks.world_size, device, index)
        num_blocks, kv = self._kv_cache_config.num_blocks, model_kv(model, groups)
        if is_split:
            check_ascend(self._vllm_config.additional_config, npu_formats(kv_caches))
            heads_first = os.environ.get("VLLM_KV_CACHE_LAYOUT") in HEADS_FIRST
            view = view_ascend_caches(kv_caches, kv, position, num_blocks, heads_first=heads_first)
        else:
            layers = self._vllm_config.compilation_config.static_forward_context
            named = {name: layers[name] for name in kv_caches}
            packing = page_format(device.kind, named, kv_caches, kv.plane_dims)
            view = view_caches(kv_caches, kv, position, num_blocks, packing)
        rank = stage.rank_in_group * ranks.world_size + ranks.rank_in_group
        path = worker_sockets(self._vllm_config, type(self).__name__)[rank]
        self._worker = WorkerSide(
            self._config,
            rank,
            path,
            view,
            device,
            kind=self._worker_kind(),
            wait=step_wait(self._vllm_config),
            convert_rope_order=rope_order_converter(kv_caches, kv),
        )

    @guarded(_return_none)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the step. Loads begin here, before the forward pass, unless the step zeroes new
        blocks first."""
        super().bind_connector_metadata(connector_metadata)
        # While a graph is captured, vLLM passes metadata of another class.
        if self._worker is not None and isinstance(connector_metadata, HalStepMetadata):
            wait_s = IDLE_WAIT_S if connector_metadata.waits else 0.0
            self._worker.begin_step(connector_metadata.pushes, connector_metadata.held, wait_s)
        if not self._zeroes_blocks:
            self._release(connector_metadata)

    @guarded(_return_none)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._zeroes_blocks and self.has_connector_metadata():
            self._release(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after its load is complete."""

    @guarded(_return_none)
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let a pushed layer be sent; layers without this call are sent after the step."""
        self._layer_written(layer_name)

    @guarded(_return_none)
    def on_kv_cache_written(self, layer_name: str) -> None:
        """vLLM-Ascend's hook, called before the layer's attention."""
        self._layer_written(layer_name)

    @guarded(_return_none)
    def wait_for_save(self) -> None:
        """End the step, without blocking: blocks that are read or sent are held until a report."""
        if self._worker is not None:
            self._worker.end_step()

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_results()
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )

    # ------------------------------------------------------------- both

    @guarded(_return_none)
    def get_kv_connector_stats(self) -> HalStats | None:
        """The scheduler side's metrics; on a rank, only the hook errors. vLLM aggregates them."""
        metrics = {} if self._scheduler is None else self._scheduler.stats()
        metrics[f"{POOL if self.is_pool else ''}hook_errors"] = float(self.num_errors)
        changed = self._deltas.take(metrics)
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
        """No: memory that is registered with transports can't be moved, as peers have its
        addresses."""
        return False

    @guarded(_return_none)
    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @property
    def _scheduler_side(self) -> SchedulerHooks:
        assert self._scheduler is not None, "vLLM calls a worker's connector as a scheduler's"
        return self._scheduler

    def _finish(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_held, params = self._scheduler_side.request_finished(request, tables)
        if is_held:
            self._held.append(request.request_id)
        return is_held, params

    def _layer_written(self, layer_name: str) -> None:
        """Report a layer to the worker. Calls without a layer's name, as vLLM-Ascend makes them,
        are ignored. With micro-batches, each of them makes a call per layer without identifying
        itself, so all layers are sent after the step."""
        if self._worker is not None and self._names_layers and layer_name:
            self._worker.layer_done(layer_name)

    @property
    def _zeroes_blocks(self) -> bool:
        return bool(self._kv_cache_config.needs_kv_cache_zeroing)

    def _release(self, metadata: KVConnectorMetadata) -> None:
        """Release the step's loads. While a graph is captured, the metadata are of another class,
        which has none."""
        loads: Iterable[str] = getattr(metadata, "loads", ())
        if self._worker is not None:
            self._worker.release_loads(loads)


class HalPullConnector(HalConnector):
    """D reads a finished prompt's KV from P, under a lease; see ``mooncake_kv.pull_connector``."""

    connector_name = "MooncakeConnector"
    best_layout = "BHLNC"  # a rank's heads of a block are contiguous across all layers


class HalPushConnector(HalConnector):
    """P writes into D's blocks, layer by layer; see ``mooncake_kv.push_connector``."""

    connector_name = "MooncakeLayerwiseConnector"
    best_layout = "LBHNC"  # layers are sent one by one; in each, a block's heads are contiguous
    loads_wait_for_steps = False  # P writes, which knows nothing of D's steps


class HalPoolConnector(HalConnector):
    """Loads the chunks of a prompt that stores have, and saves what is computed; see
    ``mooncake_kv.pool``.

    To combine it with one of the two connectors above, list it after that one in vLLM's
    MultiConnector.
    """

    connector_name = "MooncakeConnector"  # for the settings of addresses and transports
    is_pool = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if (kv_role := vllm_config.kv_transfer_config.kv_role) != "kv_both":
            raise UnsupportedByVllmConnector(
                f"HalPoolConnector loads and saves, but its kv_role is {kv_role}: use kv_both, and "
                "in a MultiConnector kv_both for that, too"
            )
        super().__init__(vllm_config, role, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No, whatever the role: nobody waits for a save."""
        return False

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


# vLLM gives each kind of layers a block table of its own, and drops blocks that have left a sliding
# window, only if its connector declares that it supports KV-cache groups. Untested on NPUs.
if current_platform.device_type in ("cpu", "cuda"):
    for connector in (HalPullConnector, HalPushConnector, HalPoolConnector):
        SupportsHMA.register(connector)
