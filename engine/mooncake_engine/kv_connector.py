"""Adapts ``mooncake_kv`` connectors to the engine's scheduler and workers.

The scheduler and the core hold an ``EngineConnector``; each rank holds a ``ConnectorExtension``
beside its KV cache. The rest of KV transfer is in ``mooncake_kv``, which depends on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, InvalidRequest, PortInUse
from mooncake_engine.execution.worker_extension import ExtensionContext, LayerDone
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal.kv.geometry import AttentionKind
from mooncake_kv import addresses, connector as kv
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import PushStep, RankContext, RankMemory
from mooncake_kv.errors import InvalidKVParams, KVConfigError, SideChannelPortInUse
from mooncake_kv.handshake import InstanceMetadata
from mooncake_kv.params import (
    FirstToken,
    FirstTokenLogprobs,
    KVTransferDict,
    KVTransferParams,
    parse_kv_transfer_params,
)

EXTENSION = "mooncake_engine.kv_connector:ConnectorExtension"
"""Import path of the worker extension, as executors take it."""


@contextmanager
def engine_errors() -> Iterator[None]:
    """Converts errors of mooncake_kv to the engine's own."""
    try:
        yield
    except SideChannelPortInUse as exc:
        raise PortInUse(str(exc)) from exc
    except KVConfigError as exc:
        raise ConfigError(str(exc)) from exc
    except InvalidKVParams as exc:
        raise InvalidRequest(str(exc), param="kv_transfer_params") from exc


def find_connector(name: str) -> kv.ConnectorType:
    """Returns the connector of that name.

    Raises:
        ConfigError: there is none, or its module can't be loaded; the message lists all names.
    """
    with engine_errors():
        return kv.find_connector(name)


def settle_addresses(config: KVTransferConfig) -> KVTransferConfig:
    """Resolve host names, and choose the address for peers if none is configured.

    Raises:
        ConfigError: a name can't be resolved, or this host has no suitable address.
    """
    with engine_errors():
        return addresses.settle_addresses(config)


def resolve(host: str, option: str) -> str:
    """Returns the address of a host; ``option`` is the option that named it.

    Raises:
        ConfigError: the name can't be resolved.
    """
    with engine_errors():
        return addresses.resolve(host, option)


def read_kv_transfer_params(
    params: KVTransferDict | None, prompt_token_ids: Sequence[int], cache_salt: str = ""
) -> KVTransferParams:
    """Parses a request's ``kv_transfer_params`` when it enters the engine.

    Raises:
        InvalidRequest: a field is missing or has the wrong type, or contradicts the prompt.
    """
    with engine_errors():
        return parse_kv_transfer_params(params, prompt_token_ids, cache_salt)


class EngineConnector:
    """The connector of one data-parallel rank; implements the scheduler's ``KVConnector``.

    Args:
        config: the instance's config, with ``kv_transfer`` set.
        dp_rank: data-parallel rank. Peers see each rank as an instance of its own, whose side
            channel is at the configured port plus ``dp_rank``.

    Raises:
        ConfigError: the connector does not exist.
    """

    def __init__(self, config: EngineConfig, dp_rank: int = 0) -> None:
        kv_transfer = config.kv_transfer
        assert kv_transfer is not None, "without kv_transfer there is no connector"
        if kv_transfer.port:
            kv_transfer = replace(kv_transfer, port=kv_transfer.port + dp_rank)
        entry = find_connector(kv_transfer.connector)
        self._connector = entry(kv_transfer, config.num_ranks)
        self._facts = {"remote_dp_rank": dp_rank} if config.dp_size > 1 else {}
        self.on_rank_message = self._connector.on_rank_message
        self.stats = self._connector.stats
        self.compatibility = self._connector.compatibility
        self.topology = self._connector.topology
        self.close = self._connector.close
        self.cancel_load = self._connector.cancel_load
        self.cancel_send = self._connector.cancel_send

    def start(
        self,
        instance: InstanceMetadata,
        send: Callable[[bytes, int], None],
        post: kv.PostEvent,
        has_stalled: kv.HasStalled = kv.never_stalls,
    ) -> None:
        """Wait for the ranks, bind the ports, and start to serve peers.

        Args:
            instance: metadata for the handshake with peers.
            send: sends a message to a rank; see ``Executor.send``.
            post: receives the connector's events.
            has_stalled: whether the core has stopped stepping; leases and reservations of peers
                are then no longer kept alive.

        Raises:
            PortInUse: a port is in use.
            ConfigError: a rank did not start.
        """
        with engine_errors():
            self._connector.start(
                instance,
                send=lambda rank, message: send(message, rank),
                post=post,
                has_stalled=has_stalled,
            )

    def on_new_request(self, request: Request) -> None:
        self._connector.on_new_request(request.request_id, request.spec.kv_transfer_params)

    def start_load_kv(self, request: Request) -> None:
        self._connector.start_load_kv(
            request.request_id,
            request.block_ids,
            request.spec.prompt_token_ids,
            request.num_computed,
            cache_salt=request.spec.cache_salt,
        )

    def prefill_advanced(self, request: Request) -> None:
        self._connector.prefill_advanced(
            request.request_id, request.block_ids, request.num_computed, request.num_preemptions
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> KVTransferDict | None:
        logprobs = request.last_logprobs
        first = FirstToken(
            request.token_ids[-1],
            None if logprobs is None else FirstTokenLogprobs(logprobs.logprob, logprobs.top),
            request.num_cached_tokens,
        )
        params = self._connector.request_finished(
            request.request_id,
            block_ids,
            request.spec.prompt_token_ids,
            first,
            cache_salt=request.spec.cache_salt,
            attempt=request.num_preemptions,
        )
        return params if params is None else {**params, **self._facts}


def rank_context(context: ExtensionContext, network: KVTransferConfig) -> RankContext:
    """Returns the context for a rank's part of a connector or of the KVCache pool."""
    pool, runtime = context.pool, context.backend.runtime
    has_latents = pool.geometry.kind is AttentionKind.MLA
    memory = RankMemory(
        pool.geometry,
        pool.shard,
        pool.layout,
        (pool.region,),
        context.backend.capabilities.transports,
        pool.convert_rope_order if has_latents else None,
    )
    return RankContext(
        context.rank,
        network,
        memory,
        context.registry,
        make_event=partial(runtime.event, context.device),
        bind_thread=partial(runtime.bind_thread, context.device),
        emit=context.emit,
        fail=context.fail,
        shared=context.shared,
    )


class ConnectorExtension:
    """A connector's worker part as a rank's extension; see ``WorkerExtension``."""

    def __init__(self, context: ExtensionContext) -> None:
        config = context.config.kv_transfer
        if config is None:
            raise ConfigError(f"{type(self).__name__} needs a kv_transfer configuration")
        self.context = context
        self._sending: set[str] = set()
        self._restarts: dict[str, tuple[int, ...]] = {}
        with engine_errors():
            make_worker = find_connector(config.connector).worker
            self._worker = make_worker(rank_context(context, config))
        self.receive = self._worker.receive
        self.close = self._worker.close

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """End the last step for the connector's worker, since all its kernels have been enqueued,
        and begin the next one."""
        self._worker.end_step()
        return self._worker.begin_step(self._push_steps(plan))

    def _push_steps(self, plan: StepPlan) -> list[PushStep]:
        """Returns the step's progress of the requests whose KV is sent to a peer."""
        self._sending.difference_update(plan.removed)  # first: a step may remove and re-add an id
        for new in plan.new_requests:
            if new.sends_kv:
                self._sending.add(new.request_id)
                self._restarts[new.request_id] = new.block_ids
        if not self._sending:
            return []
        return [
            PushStep(
                sequence.request_id,
                sequence.start + sequence.count,
                sequence.new_block_ids,
                self._restarts.pop(sequence.request_id, None),
            )
            for sequence in plan.sequences
            if sequence.request_id in self._sending
        ]
