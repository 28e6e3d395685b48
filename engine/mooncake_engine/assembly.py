"""Builds a core from a configuration: everything is checked before anything is loaded."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from mooncake_engine.config import EngineConfig, ExecutorKind, LoadFailurePolicy
from mooncake_engine.core import Command, EngineCore
from mooncake_engine.errors import ConfigError, PortTaken
from mooncake_engine.execution.executor import (
    Executor,
    ExecutorFacts,
    ExecutorOptions,
    InProcessExecutor,
)
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.execution.ray_ranks import RayLauncher
from mooncake_engine.execution.setup import choose_block_size
from mooncake_engine.execution.weights import ProgressHandler
from mooncake_engine.kv_transfer.addresses import settle_addresses
from mooncake_engine.kv_transfer.base import (
    Connector,
    ConnectorSetup,
    ConnectorType,
    find_connector,
)
from mooncake_engine.kv_transfer.endpoints import transports_wanted
from mooncake_engine.messages import EngineFacts
from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.limits import SchedulerLimits
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.text.tokenizer import same_tokens, tokenizer_fingerprint
from mooncake_hal.backend import Backend
from mooncake_hal.deployment import Hardware
from mooncake_hal.errors import HalError
from mooncake_hal.negotiation import count_ports, reserved_ports
from mooncake_hal.port_range import PortRange, why_reserved
from mooncake_hal.ports import Port, count_free, find_taken
from mooncake_hal.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that is ready to step, and what is known about it."""

    core: EngineCore
    facts: EngineFacts


class _Post:
    """Stands for a part that is built later: keeps what is sent to it until then."""

    def __init__(self) -> None:
        self._kept: list[tuple[object, ...]] = []
        self._target: Callable[..., None] | None = None

    def __call__(self, *message: object) -> None:
        if self._target is None:
            self._kept.append(message)
        else:
            self._target(*message)

    def connect(self, target: Callable[..., None]) -> None:
        """Deliver what was kept, and everything from now on."""
        for message in self._kept:
            target(*message)
        self._target = target


def build_engine(config: EngineConfig, progress: ProgressHandler | None = None) -> Engine:
    """Load a model and connect its parts.

    Raises:
        ConfigError, CheckpointError: what was asked for can't be set up; says what to change.
    """
    config = _settle_addresses(config)
    _check_speculation(config)
    engine_id = f"{config.role.value}-{secrets.token_hex(8)}"
    entry = None if config.kv_transfer is None else find_connector(config.kv_transfer.connector)
    registry = Registry.discover()
    backend = _select_backend(registry, config)
    _check_reserved_ports(config, backend, registry)
    _check_port_range(config, backend, registry)
    block_size = choose_block_size(config, backend)
    _limit_threads(config)
    rank_post = _Post()
    options = ExecutorOptions(entry.worker if entry else None, rank_post, progress)
    try:
        executor = _build_executor(config, backend, options)
    except HalError as exc:
        raise ConfigError(f"backend {backend.name!r} can't load the model: {exc}") from exc
    logger.info("KV blocks of %d tokens: %s", block_size.tokens, block_size.reason)
    try:
        return _connect(config, engine_id, backend, executor, (entry, rank_post))
    except BaseException:
        executor.close()
        raise


def _build_executor(config: EngineConfig, backend: Backend, options: ExecutorOptions) -> Executor:
    if config.executor is ExecutorKind.RAY:
        resource = backend.capabilities.scheduler_resource
        return ProcessExecutor(config, backend, options, RayLauncher(config, resource))
    if config.num_ranks == 1:
        return InProcessExecutor(config, backend, options)
    return ProcessExecutor(config, backend, options)


def _connect(
    config: EngineConfig,
    engine_id: str,
    backend: Backend,
    executor: Executor,
    link: tuple[ConnectorType | None, _Post],
) -> Engine:
    entry, rank_post = link
    inbox = _Post()
    connector = None
    if entry is not None:
        connector = _start_connector(config, engine_id, backend, executor, (entry, inbox))
        rank_post.connect(connector.on_rank_message)
        connector.start()
    executor.warm_up()
    scheduler = _scheduler(config, executor, connector)
    core = EngineCore(scheduler, executor, connector, steps_in_flight=config.steps_in_flight)
    inbox.connect(core.post)
    facts = executor.facts
    return Engine(
        core,
        EngineFacts(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            num_kv_blocks=facts.num_blocks,
            block_size=facts.block_size,
            engine_id=engine_id,
            lends_kv=not facts.has_resident_latents,
        ),
    )


def _start_connector(
    config: EngineConfig,
    engine_id: str,
    backend: Backend,
    executor: Executor,
    link: tuple[ConnectorType, Callable[[Command], None]],
) -> Connector:
    entry, sink = link
    device = next(d for d in backend.runtime.devices() if d.index == config.device)
    hardware = Hardware(backend.name, device.generation, backend.capabilities.constraints)
    return entry(
        ConnectorSetup(
            config=config,
            engine_id=engine_id,
            geometry=executor.facts.geometry,
            block_size=executor.facts.block_size,
            hardware=hardware,
            tokenizer_fingerprint=tokenizer_fingerprint(config.model),
            send=lambda rank, message: executor.send(message, rank),
            sink=sink,
        ),
    )


def _scheduler(config: EngineConfig, executor: Executor, connector: Connector | None) -> Scheduler:
    facts = executor.facts
    policy = config.kv_transfer.load_failure if config.kv_transfer else LoadFailurePolicy.RECOMPUTE
    speculation = config.speculation
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        eos_token_ids=frozenset(facts.eos_token_ids),
        load_failure=policy,
        watermark=config.watermark,
        delay_factor=config.scheduler_delay_factor,
        num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
        feeds_forward=config.feeds_forward,
        names_arrivals=facts.has_resident_latents,
    )
    if config.async_scheduling and not config.feeds_forward:
        logger.warning(
            "async scheduling is off: it does not go together with %s",
            f"{config.pp_size} pipeline stages" if config.pp_size > 1 else "speculative decoding",
        )
    _tell_pool(config, facts)
    blocks = BlockManager(
        facts.num_blocks,
        facts.block_size,
        prefix_caching=config.prefix_caching,
        num_host_blocks=facts.num_host_blocks,
    )
    return Scheduler(limits, blocks, connector)


def _tell_pool(config: EngineConfig, facts: ExecutorFacts) -> None:
    """Here and not where it is decided, which is in every rank."""
    logger.info(
        "KV pool: %d blocks of %d tokens, %d tokens in all",
        facts.num_blocks,
        facts.block_size,
        facts.num_blocks * facts.block_size,
    )
    if config.max_model_len is None and facts.max_model_len < facts.model.max_positions:
        logger.warning(
            "the KV pool limits prompt and answer together to %d tokens, the model takes %d: "
            "give it more (--kv-cache-bytes, --num-kv-blocks, --memory-utilization), or say with "
            "--max-model-len that so many are enough",
            facts.max_model_len,
            facts.model.max_positions,
        )


def _settle_addresses(config: EngineConfig) -> EngineConfig:
    """Loading takes minutes; that an address is none, or its port is taken, is known now."""
    if config.kv_transfer is None:
        return config
    kv = settle_addresses(config.kv_transfer)
    problems = find_taken([Port("the KV side channel", kv.host, kv.port)])
    if problems:
        raise PortTaken("; ".join(problems))
    return replace(config, kv_transfer=kv)


def _check_reserved_ports(config: EngineConfig, backend: Backend, registry: Registry) -> None:
    """What a transport is built on may take ports later, and fail then if they are ours."""
    kv = config.kv_transfer
    if kv is None:
        return
    single = {"the API (--port)": kv.api_port, "the KV side channel (--kv-port)": kv.port}
    wanted = {what: PortRange(port, port) for what, port in single.items() if port}
    if kv.port_range is not None:
        wanted["--kv-port-range"] = kv.port_range
    try:
        reserved = reserved_ports(registry, **transports_wanted(kv, backend))
    except HalError as exc:
        raise ConfigError(str(exc)) from exc
    found = [why_reserved(what, ports, reserved) for what, ports in wanted.items()]
    if any(found):
        raise PortTaken("; ".join(problem for problem in found if problem))


def _check_port_range(config: EngineConfig, backend: Backend, registry: Registry) -> None:
    """A range must last for what all ranks on this host listen on; where Ray puts them is known
    later, and one of them at least may be here."""
    kv = config.kv_transfer
    if kv is None or kv.port_range is None:
        return
    num_ranks = 1 if config.executor is ExecutorKind.RAY else config.num_ranks
    per_rank = count_ports(registry, **transports_wanted(kv, backend))
    wanted = num_ranks * per_rank + (kv.port == 0)
    found = count_free(kv.port_range, kv.host, wanted)
    if found < wanted:
        raise PortTaken(
            f"{wanted} ports of --kv-port-range {kv.port_range} are wanted on {kv.host}, {found} "
            f"are free: each of {num_ranks} ranks takes {per_rank} for its transports, the side "
            f"channel {int(kv.port == 0)}; widen the range"
        )


def _check_speculation(config: EngineConfig) -> None:
    if config.speculation is None:
        if config.speculative_config is not None:
            logger.info("a prefill instance samples one token per request: nothing is guessed here")
        return
    draft = config.speculation.model
    if draft is not None and not same_tokens(config.model, draft):
        raise ConfigError(
            f"the tokens of the draft model in {draft} are not those of the model in "
            f"{config.model}: use a draft model of the same family"
        )


def _select_backend(registry: Registry, config: EngineConfig) -> Backend:
    try:
        return registry.select_backend(config.backend)
    except HalError as exc:
        raise ConfigError(str(exc)) from exc


def _limit_threads(config: EngineConfig) -> None:
    if config.threads:
        import torch

        torch.set_num_threads(config.threads)
