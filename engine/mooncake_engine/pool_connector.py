"""Adapts the KVCache pool of ``mooncake_kv.pool`` to the engine's scheduler and workers.

The scheduler and the core hold an ``EnginePool``; each rank holds a ``PoolExtension`` beside its
KV memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.worker_extension import ExtensionContext, LayerDone
from mooncake_engine.kv_connector import engine_errors, rank_context
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal.kv.geometry import KVGeometry
from mooncake_hal.registry import Registry
from mooncake_kv.connector import ConnectorFailed, HasStalled, never_stalls
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.pool.pool_client import PoolClient
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_kv.pool.pool_events import PoolEvent, PoolStats, StoreReport
from mooncake_kv.pool.pool_stores import PoolStores
from mooncake_kv.pool.pool_worker import PoolWorker
from mooncake_kv.store.chunk_keys import KVIdentity, completes_chunks, extend_keys
from mooncake_kv.store.chunk_store import StoreStats

EXTENSION = "mooncake_engine.pool_connector:PoolExtension"
"""Import path of the worker extension, as executors take it."""


def check_pool(config: KVPoolConfig, block_size: int) -> None:
    """Check that a chunk consists of whole blocks.

    Raises:
        ConfigError: the chunk size is no multiple of the block size.
    """
    if config.chunk_tokens % block_size:
        raise ConfigError(
            f"--kv-pool: a chunk has {config.chunk_tokens} tokens, which is no multiple of the "
            f"block size, {block_size}: use chunk=N with a multiple of it, the same for all "
            "instances that share KV"
        )


def open_stores(
    config: KVPoolConfig, registry: Registry, name: str, kv_events: KVEventsConfig | None
) -> PoolStores:
    """Opens the stores of an instance.

    Args:
        config: the pool's config.
        registry: backends and transports.
        name: the instance's name at the stores.
        kv_events: config of the KV events of its own store; None publishes none.

    Raises:
        ConfigError: a store can't be opened or reached as configured.
    """
    with engine_errors():
        return PoolStores(config, registry, name, kv_events)


class EnginePool:
    """The KVCache pool of one data-parallel rank; implements ``ChunkPool``.

    Args:
        config: the pool's config.
        stores: the instance's open stores, which its data-parallel ranks share. The first rank
            that is closed closes them, after all ranks have ended.
        identity: identity of the model's KV.
        geometry: geometry of the model's KV.
        num_ranks: number of ranks of the data-parallel rank.
    """

    def __init__(
        self,
        config: KVPoolConfig,
        stores: PoolStores,
        identity: KVIdentity,
        geometry: KVGeometry,
        num_ranks: int,
    ) -> None:
        self._stores = stores
        self.chunk_tokens = config.chunk_tokens
        self.always_loads = config.always_loads
        self.num_layers = geometry.layers
        self.transfer_timeout_s = config.network.transfer_timeout_s
        self._identity = identity
        self._client = client = PoolClient(
            stores, geometry, identity, self.transfer_timeout_s, num_ranks
        )
        self.chunk_bytes = client.chunk_bytes
        self.stats = client.stats
        self.load_costs = client.load_costs
        self.on_rank_message = client.on_rank_message
        self.lookup = client.lookup
        self.start_load = client.start_load
        self.cancel_load = client.cancel_load
        self.save = client.save
        self.end_save = client.end_save
        self.stop = client.stop
        self.close = client.close

    @property
    def store_stats(self) -> StoreStats | None:
        return self._stores.own_stats()

    def read_stats(self) -> PoolStats:
        found, stores = self.stats.snapshot(), self._stores
        found.num_stores, found.num_connected_stores = len(stores.all), stores.num_connected
        return found

    @property
    def publishes_saves(self) -> bool:
        return self._stores.publishes_saves

    @property
    def store_reports(self) -> tuple[StoreReport, ...]:
        namespace = self._client.namespace.hex()
        return tuple(
            replace(
                each,
                kv_events=each.kv_events
                and msgspec.structs.replace(each.kv_events, namespace=namespace),
            )
            for each in self._stores.reports
        )

    def start(
        self,
        send: Callable[[bytes, int], None],
        post: Callable[[PoolEvent | ConnectorFailed], None],
        has_stalled: HasStalled = never_stalls,
    ) -> None:
        """Wait for the ranks, and start.

        Args:
            send: sends a message to a rank; see ``Executor.send``.
            post: receives the pool's events.
            has_stalled: whether the core has stopped stepping; ranks begin no load or save
                meanwhile.

        Raises:
            ConfigError: a rank did not start.
        """
        with engine_errors():
            self._client.start(
                lambda rank, message: send(message, rank),
                post,
                lambda dead: post(ConnectorFailed(dead)),
                has_stalled,
            )

    def keys(self, request: Request, num_chunks: int) -> list[bytes]:
        keys = request.chunk_keys
        if len(keys) < num_chunks:
            size = self.chunk_tokens
            parent = keys[-1] if keys else self._identity.root(request.spec.cache_salt)
            tokens = request.token_ids[len(keys) * size : num_chunks * size]
            keys += extend_keys(self._identity, parent, tokens)
        return keys[:num_chunks]


class PoolExtension:
    """The pool's worker part as a rank's extension; see ``WorkerExtension``."""

    def __init__(self, context: ExtensionContext) -> None:
        pool = context.config.kv_pool
        if pool is None:
            raise ConfigError(f"{type(self).__name__} needs a kv_pool configuration")
        with engine_errors():
            self._worker = PoolWorker(rank_context(context, pool.network))
        self._chunk_tokens = pool.chunk_tokens
        self.receive = self._worker.receive
        self.close = self._worker.close

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """Begin a step. Before each layer reads KV, the step waits for the loads of its requests;
        after each layer is written, the chunks that the step completes are saved."""
        completes = self._completes_chunks(plan)
        if not completes and not self._worker.has_loads:
            return None
        names = {sequence.request_id for sequence in plan.sequences}
        return self._worker.begin_step(plan.step, names, completes_chunks=completes)

    def _completes_chunks(self, plan: StepPlan) -> bool:
        for sequence in reversed(plan.sequences):
            if sequence.count == 1:  # all before it have one, too
                return False
            stop = sequence.start + sequence.count
            if completes_chunks(sequence.start, stop, self._chunk_tokens):
                return True
        return False
