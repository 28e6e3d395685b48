"""Builds a running engine from a configuration, in two phases: plan, then start."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from mooncake_engine.config import EngineConfig, ExecutorKind
from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import Command, ProgressHandler
from mooncake_engine.data_parallel_core import DataParallelCore, dp_engine_id
from mooncake_engine.errors import CheckpointError, ConfigError, PortInUse
from mooncake_engine.execution.engine_plan import (
    EnginePlan,
    all_shards,
    block_bytes,
    make_plan,
)
from mooncake_engine.execution.executor import (
    Executor,
    ExecutorInfo,
    ExecutorOptions,
    InProcessExecutor,
)
from mooncake_engine.execution.node_launcher import NodeLauncher
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.execution.rank_launcher import (
    Launcher,
    LocalLauncher,
    Rank,
    has_local_ranks,
)
from mooncake_engine.execution.rank_processes import RankProcesses
from mooncake_engine.execution.ray_launcher import RayLauncher
from mooncake_engine.execution.worker_extension import ExtensionMessages
from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.kv_connector import (
    EXTENSION,
    EngineConnector,
    engine_errors,
    find_connector,
    settle_addresses,
)
from mooncake_engine.messages import EngineInfo
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.rope import LongRopeScaling
from mooncake_engine.pool_connector import (
    EXTENSION as POOL_EXTENSION,
    EnginePool,
    check_pool,
    open_stores,
)
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.step_watchdog import StepWatch
from mooncake_engine.text.tokenizer import same_tokens
from mooncake_engine.text.tokenizer_files import tokenizer_fingerprint
from mooncake_hal.backend import Backend, Capabilities
from mooncake_hal.deployment import Hardware
from mooncake_hal.errors import HalError
from mooncake_hal.negotiation import count_ports, reserved_ports
from mooncake_hal.port_range import PortRange, reservation_conflict
from mooncake_hal.ports import Port, count_free, find_ports_in_use
from mooncake_hal.registry import Registry
from mooncake_kv.config import KVTransferConfig, LoadFailurePolicy
from mooncake_kv.connector_worker import choose_transports
from mooncake_kv.errors import KVConfigError
from mooncake_kv.handshake import InstanceMetadata
from mooncake_kv.kv_event_publisher import KVEventPublisher
from mooncake_kv.kv_events import KVEventLog
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.model_fingerprint import (
    ModelFingerprint,
    longrope_settings,
    model_fingerprint,
)
from mooncake_kv.numerics import ROPE_ORDER, Numerics
from mooncake_kv.store.chunk_keys import KVIdentity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A core that is ready to step, and the static facts about it."""

    core: EngineCore | DataParallelCore
    info: EngineInfo


def build_engine(
    config: EngineConfig,
    progress: ProgressHandler | None = None,
    watch: StepWatch | None = None,
    ranks: Sequence[Rank] = (),
) -> RunningEngine:
    """Plan an engine and start it.

    Args:
        config: the engine's config.
        progress: called while weights are loaded.
        watch: watchdog state, updated when steps begin and end; None creates one.
        ranks: see ``start_executors``.

    Raises:
        ConfigError, CheckpointError: the engine can't be set up as configured.
    """
    registry = Registry.discover()
    return start_engine(plan_engine(config, registry), registry, progress, watch, ranks)


def plan_engine(config: EngineConfig, registry: Registry) -> EnginePlan:
    """Decide everything that can be decided before anything is loaded or started.

    Reads the checkpoint's config and the backend's capabilities; allocates no memory, binds no port
    and starts no thread.

    Raises:
        ConfigError, CheckpointError: the engine can't be set up as configured.
    """
    if config.kv_transfer is not None:
        find_connector(config.kv_transfer.connector)
        config = replace(config, kv_transfer=settle_addresses(config.kv_transfer))
    if config.kv_pool is not None:
        network = config.kv_transfer or settle_addresses(config.kv_pool.network)
        config = replace(config, kv_pool=config.kv_pool.with_network(network))
    _check_speculation(config)
    try:
        plan = make_plan(config, registry.select_backend(config.backend))
    except HalError as exc:
        raise ConfigError(str(exc)) from exc
    if config.kv_pool is not None:
        check_pool(config.kv_pool, plan.block_size.tokens)
    return plan


def start_engine(
    plan: EnginePlan,
    registry: Registry,
    progress: ProgressHandler | None = None,
    watch: StepWatch | None = None,
    ranks: Sequence[Rank] = (),
) -> RunningEngine:
    """Load the model on all ranks, connect the parts, and start to serve peers.

    Args:
        plan: plan from ``plan_engine``.
        registry: registry that the engine was planned with.
        progress, watch, ranks: see ``build_engine``.

    Raises:
        ConfigError, CheckpointError: the plan can't be carried out, for example because a port is
            taken or the model does not fit into memory.
    """
    config = plan.config
    backend = registry.select_backend(plan.backend)
    _check_ports(config, backend, registry)
    if config.threads:
        torch.set_num_threads(config.threads)
    engine_id = f"{config.role.value}-{secrets.token_hex(8)}"
    watch = watch or StepWatch(config.step_timeout_s)
    with ExitStack() as cleanup:
        open_pool = None
        if config.kv_pool is not None:
            stores = open_stores(config.kv_pool, registry, engine_id, _store_events(config))
            cleanup.callback(stores.close)
            open_pool = partial(
                EnginePool,
                config.kv_pool,
                stores,
                pool_identity(plan, config.kv_pool.chunk_tokens),
                plan.geometry,
                config.num_ranks,
            )
        links = [
            _open_links(config, open_pool, dp_engine_id(engine_id, dp_rank), dp_rank, cleanup)
            for dp_rank in range(config.dp_size)
        ]
        options = [link.executor_options(progress, registry) for link in links]
        executors = start_executors(plan, backend, options, ranks)
        for executor in executors:
            cleanup.callback(executor.close)
        logger.info("KV blocks of %d tokens: %s", plan.block_size.tokens, plan.block_size.reason)
        cores = [
            _make_core(plan, executor, link, watch)
            for executor, link in zip(executors, links, strict=True)
        ]
        core = cores[0] if len(cores) == 1 else _join_cores(config, cores, watch)
        cleanup.callback(core.close)  # the connectors before the ranks, whose memory they use
        for dp_rank, (link, executor) in enumerate(zip(links, executors, strict=True)):
            post = core.poster(dp_rank) if isinstance(core, DataParallelCore) else core.post
            link.start(plan, backend, executor, post, watch)
        with ThreadPoolExecutor(len(executors)) as threads:  # ranks may have to step together
            list(threads.map(lambda executor: executor.warm_up(), executors))
        cleanup.pop_all()
    return RunningEngine(core, _engine_info([executor.info for executor in executors], engine_id))


@dataclass(frozen=True, slots=True)
class _Links:
    """A data-parallel rank's connections to other instances: its connector and its KVCache pool.

    Args:
        engine_id: the rank's engine id among peers.
        dp_rank: data-parallel rank.
        messages: channel between the connector and the pool and their worker parts on the ranks.
        connector: connector; None without disaggregation.
        pool: KVCache pool; None without one.
    """

    engine_id: str
    dp_rank: int
    messages: ExtensionMessages
    connector: EngineConnector | None
    pool: EnginePool | None

    def executor_options(
        self, progress: ProgressHandler | None, registry: Registry
    ) -> ExecutorOptions:
        """Returns the options of the rank's executor."""
        return ExecutorOptions(
            self.messages.factories, self.messages.handle_message, progress, registry
        )

    def start(
        self,
        plan: EnginePlan,
        backend: Backend,
        executor: Executor,
        post: Callable[[Command], None],
        watch: StepWatch,
    ) -> None:
        """Start the connector and the pool, after the ranks have loaded the model."""
        if self.connector is not None:
            self.connector.start(
                _describe(plan, self.engine_id, backend),
                self.messages.sender(self.messages.number(EXTENSION), executor.send),
                post,
                watch.has_stalled,
            )
        if self.pool is not None:
            send = self.messages.sender(self.messages.number(POOL_EXTENSION), executor.send)
            self.pool.start(send, post, watch.has_stalled)


def _open_links(
    config: EngineConfig,
    open_pool: Callable[[], EnginePool] | None,
    engine_id: str,
    dp_rank: int,
    cleanup: ExitStack,
) -> _Links:
    messages = ExtensionMessages()
    connector = None if config.kv_transfer is None else EngineConnector(config, dp_rank)
    pool = None if open_pool is None else open_pool()
    # the pool first: a step waits for its loads before the connector sends what it computes
    if pool is not None:
        cleanup.callback(pool.close)
        messages.add(POOL_EXTENSION, pool.on_rank_message)
    if connector is not None:
        messages.add(EXTENSION, connector.on_rank_message)
    return _Links(engine_id, dp_rank, messages, connector, pool)


def _engine_info(infos: Sequence[ExecutorInfo], engine_id: str) -> EngineInfo:
    """Returns the engine's static facts. Data-parallel ranks may have measured different numbers of
    KV blocks; the smallest counts for all."""
    least = min(infos, key=lambda info: info.num_blocks)
    return EngineInfo(
        max_model_len=least.max_model_len,
        vocab_size=least.vocab_size,
        eos_token_ids=least.eos_token_ids,
        num_kv_blocks=least.num_blocks * len(infos),
        block_size=least.block_size,
        engine_id=engine_id,
        lends_kv=not least.has_native_latents,
        dp_size=len(infos),
    )


def start_executors(
    plan: EnginePlan,
    backend: Backend,
    options: Sequence[ExecutorOptions],
    ranks: Sequence[Rank] = (),
) -> Sequence[Executor]:
    """Load the model on all ranks: in this process if there is only one, otherwise in a process per
    rank.

    Args:
        plan: plan of the instance.
        backend: the backend.
        options: options of each data-parallel rank's executor.
        ranks: all ranks, if they have been forked already; otherwise they are started now.

    Returns:
        The executor of each data-parallel rank.

    Raises:
        ConfigError, CheckpointError: the model can't be loaded as planned.
    """
    config = plan.config
    try:
        if config.num_all_ranks == 1 and config.executor is not ExecutorKind.RAY:
            return [InProcessExecutor(plan, backend, options[0])]
        launcher: Launcher
        if has_local_ranks(config):
            launcher = LocalLauncher(config, ranks)
        elif config.executor is ExecutorKind.RAY:
            launcher = RayLauncher(config, backend.capabilities.scheduler_resource)
        else:
            launcher = NodeLauncher(config)
        processes = RankProcesses(plan, options, launcher)
        return [
            ProcessExecutor(plan, each, processes=processes, dp_rank=dp_rank)
            for dp_rank, each in enumerate(options)
        ]
    except HalError as exc:
        raise ConfigError(f"backend {backend.name!r} can't load the model: {exc}") from exc
    except MemoryError as exc:
        raise ConfigError(
            f"this host does not have the memory for a step of up to {config.max_num_seqs} "
            f"sequences: {exc}; lower --max-num-seqs or --max-model-len"
        ) from exc


def _make_core(
    plan: EnginePlan,
    executor: Executor,
    links: _Links,
    watch: StepWatch,
) -> EngineCore:
    config = plan.config
    return EngineCore(
        _make_scheduler(config, executor.info, links.connector, links.pool, links.dp_rank),
        executor,
        links.connector,
        steps_in_flight=config.steps_in_flight,
        seed=config.seed,
        watch=watch,
        block_bytes=_block_bytes(plan),
    )


def _join_cores(
    config: EngineConfig, cores: Sequence[EngineCore], watch: StepWatch
) -> DataParallelCore:
    return DataParallelCore(
        cores,
        dispatch_min_tokens=config.ep_dispatch_min_tokens if config.has_expert_rounds else None,
        seed=config.seed,
        watch=watch,
    )


def _describe(plan: EnginePlan, engine_id: str, backend: Backend) -> InstanceMetadata:
    """Returns the metadata that peers get in the handshake."""
    config = plan.config
    device = next(d for d in backend.runtime.devices() if d.index == config.device)
    model = _fingerprint(plan)
    return InstanceMetadata(
        engine_id,
        model.weights,
        tokenizer_fingerprint(config.model, config.chat_template),
        plan.geometry,
        plan.block_size.tokens,
        Hardware(backend.name, device.generation),
        model_settings=model.settings,
        numerics=Numerics(
            plan.kv_meaning, rounding_of(plan, backend.capabilities, device.generation)
        ),
    )


def _fingerprint(plan: EnginePlan) -> ModelFingerprint:
    """Returns the model's fingerprint.

    Raises:
        CheckpointError: files of the checkpoint can't be read.
    """
    try:
        found = model_fingerprint(plan.config.model, str(plan.dtype).removeprefix("torch."))
    except KVConfigError as exc:
        raise CheckpointError(str(exc)) from exc
    scaling = plan.model.rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return found
    settings = longrope_settings(
        plan.max_model_len, scaling.original_positions, plan.model.max_positions
    )
    return replace(found, settings=found.settings | settings)


def pool_identity(plan: EnginePlan, chunk_tokens: int) -> KVIdentity:
    """Returns the identity of the instance's KV in the KVCache pool. KV of weights that were
    quantised on load differs from that of the checkpoint's own weights."""
    model = _fingerprint(plan)
    if plan.model.quantization is not None and plan.model.quantization.is_made_on_load:
        model = replace(model, settings=model.settings | {"quantization": "fp8 on load"})
    rope_order = "" if plan.model.mla is None else plan.kv_meaning[ROPE_ORDER]
    return KVIdentity.of_model(model, plan.geometry, chunk_tokens, rope_order)


def rounding_of(plan: EnginePlan, found: Capabilities, generation: str) -> dict[str, str]:
    """Returns the properties by which the instance's KV may differ from other instances' in the
    last bits."""
    ranks = f"tensor-parallel size {plan.config.tp_size}"
    rounding = {"kernels": generation, "sums over ranks": ranks, **dict(found.rounding)}
    rounding["linear layers"] = _products(plan.model, in_fp8=plan.has_fp8_linears)
    if plan.model.moe is not None:
        kept = plan.keeps_fp8_experts(plan.model)
        rounding["experts"] = _products(plan.model, in_fp8=kept)
    return rounding


def _products(model: ModelConfig, *, in_fp8: bool) -> str:
    """Describes the arithmetic of a model's linear layers or experts."""
    if model.quantization is None:
        return "on unquantised weights"
    if not in_fp8:
        return "on dequantised weights"
    return "in fp8, quantised on load" if model.quantization.is_made_on_load else "in fp8"


def _block_bytes(plan: EnginePlan) -> int:
    """Returns the bytes of one block of the model's KV, on all ranks together."""
    shards = all_shards(plan.config, plan.geometry)
    tokens = plan.block_size.tokens
    return sum(block_bytes((plan.geometry,), (shard,), tokens) for shard in shards)


def _store_events(config: EngineConfig) -> KVEventsConfig | None:
    """Returns the event config of the node store in this instance, whose ports follow those of the
    last data-parallel rank."""
    return None if config.kv_events is None else config.kv_events.of_dp_rank(config.dp_size)


def _make_kv_events(config: EngineConfig, block_size: int, dp_rank: int) -> KVEventLog | None:
    """Creates the event log of a data-parallel rank's block pool; None if events are off.

    Raises:
        ConfigError: the configured addresses can't be bound.
    """
    if config.kv_events is None or not config.kv_events.is_published:
        return None
    with engine_errors():
        publisher = KVEventPublisher(config.kv_events, dp_rank=dp_rank)
    endpoints = publisher.endpoints
    logger.info("KV events at %s", endpoints.endpoint)
    return KVEventLog(publisher.publish, block_size, publisher.close, endpoints)


def _make_scheduler(
    config: EngineConfig,
    info: ExecutorInfo,
    connector: EngineConnector | None,
    pool: EnginePool | None,
    dp_rank: int,
) -> Scheduler:
    policy = config.kv_transfer.load_failure if config.kv_transfer else LoadFailurePolicy.RECOMPUTE
    speculation = config.speculation
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(info.eos_token_ids),
        load_failure=policy,
        watermark=config.watermark,
        delay_factor=config.scheduler_delay_factor,
        max_step_tokens_with_decodes=config.max_step_tokens_with_decodes,
        target_tbt_s=None if config.target_tbt_ms is None else config.target_tbt_ms / 1e3,
        min_prefill_chunk=config.min_prefill_chunk,
        prefill_chunk_size=config.prefill_chunk_size,
        num_stages=config.pp_size,
        num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
        max_seqs_with_drafts=speculation.disable_by_batch_size if speculation else None,
        uses_async_scheduling=config.uses_async_scheduling,
        reports_received_blocks=info.has_native_latents,
    )
    if config.async_scheduling and not config.uses_async_scheduling:
        logger.warning(
            "async scheduling is off: it is not supported with %s",
            f"{config.pp_size} pipeline stages"
            if config.pp_size > 1
            else "speculative decoding over data-parallel ranks that share experts",
        )
    _log_kv_cache(config, info)
    blocks = BlockManager(
        info.num_blocks,
        info.block_size,
        prefix_caching=config.prefix_caching,
        num_host_blocks=info.num_host_blocks,
        events=_make_kv_events(config, info.block_size, dp_rank),
    )
    return Scheduler(limits, blocks, connector, pool)


def _log_kv_cache(config: EngineConfig, info: ExecutorInfo) -> None:
    """Log the size of the KV cache: once, not where it is decided, which is on every rank."""
    logger.info(
        "KV cache: %d blocks of %d tokens, %d tokens in all",
        info.num_blocks,
        info.block_size,
        info.num_blocks * info.block_size,
    )
    logger.info("swap space: %d blocks of host memory per rank", info.num_host_blocks)
    if config.max_model_len is None and info.max_model_len < info.model.max_positions:
        logger.warning(
            "the KV cache limits prompt and output together to %d tokens, but the model supports "
            "%d: enlarge it (--kv-cache-bytes, --num-kv-blocks, --memory-utilization), or set "
            "--max-model-len if this is enough",
            info.max_model_len,
            info.model.max_positions,
        )


def _check_ports(config: EngineConfig, backend: Backend, registry: Registry) -> None:
    """Check the ports for KV transfer before the model is loaded, which takes minutes.

    Raises:
        PortInUse: a port is taken or reserved, or a range has too few free ports.
    """
    kv = config.kv_transfer
    if kv is None:
        return
    ports = range(kv.port, kv.port + config.dp_size) if kv.port else ()
    if problems := find_ports_in_use(
        [Port("the KV side channel", kv.host, port) for port in ports]
    ):
        raise PortInUse("; ".join(problems))
    _check_reserved_ports(kv, ports, backend, registry)
    if kv.port_range is not None:
        # where Ray places the ranks is not known yet; assume that one of them runs here
        num_ranks = 1 if config.executor is ExecutorKind.RAY else config.num_ranks_per_node
        choice = choose_transports(kv, backend.capabilities.transports)
        per_rank = count_ports(registry, wanted=choice.wanted, allowed=choice.allowed)
        num_channels = 0 if kv.port else config.dp_size
        _check_port_range(kv, kv.port_range, num_ranks, per_rank, num_channels)


def _check_reserved_ports(
    kv: KVTransferConfig, side_channels: Sequence[int], backend: Backend, registry: Registry
) -> None:
    """Check that the configured ports are not reserved by a library below a transport, which would
    bind them later and fail."""
    wanted = {}
    if kv.api_port:
        wanted["the API (--port)"] = PortRange(kv.api_port, kv.api_port)
    if side_channels:
        wanted["the KV side channel (--kv-port)"] = PortRange(side_channels[0], side_channels[-1])
    if kv.port_range is not None:
        wanted["--kv-port-range"] = kv.port_range
    choice = choose_transports(kv, backend.capabilities.transports)
    try:
        reserved = reserved_ports(registry, wanted=choice.wanted, allowed=choice.allowed)
    except HalError as exc:
        raise ConfigError(str(exc)) from exc
    found = [reservation_conflict(what, ports, reserved) for what, ports in wanted.items()]
    if any(found):
        raise PortInUse("; ".join(problem for problem in found if problem))


def _check_port_range(
    kv: KVTransferConfig,
    port_range: PortRange,
    num_ranks: int,
    ports_per_rank: int,
    num_channels: int,
) -> None:
    """Check that a range has enough free ports for this host's ranks and their side channels."""
    wanted = num_ranks * ports_per_rank + num_channels
    found = count_free(port_range, kv.host, wanted)
    if found < wanted:
        raise PortInUse(
            f"{wanted} ports of --kv-port-range {port_range} are needed on {kv.host}, but only "
            f"{found} are free: each of {num_ranks} ranks needs {ports_per_rank} for its "
            f"transports, the side channel {num_channels}; widen the range"
        )


def _check_speculation(config: EngineConfig) -> None:
    if config.speculation is None:
        if config.speculative_config is not None:
            logger.info("speculative decoding is off: a prefill instance samples one token")
        return
    draft = config.speculation.model
    if draft is not None and not same_tokens(config.model, draft):
        raise ConfigError(
            f"the draft model in {draft} has another vocabulary than the model in "
            f"{config.model}: use a draft model of the same family"
        )
