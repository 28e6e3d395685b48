"""Adapts the KVCache pool of ``mooncake_kv.pool`` to the engine's scheduler and workers.

``SchedulerPool`` is what the scheduler and the core hold; ``PoolExtension`` lives beside each
rank's KV memory.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.worker_extension import ExtensionContext, LayerDone
from mooncake_engine.kv_connector import engine_errors, rank_context
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal.kv.geometry import KVGeometry
from mooncake_hal.registry import Registry
from mooncake_kv.connector import ConnectorFailed
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.pool.pool_client import PoolClient
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_kv.pool.pool_events import PoolEvent, StoreLocation
from mooncake_kv.pool.pool_stores import PoolStores
from mooncake_kv.pool.pool_worker import PoolWorker
from mooncake_kv.store.chunk_keys import KVIdentity, completes_chunks, extend_keys
from mooncake_kv.store.chunk_store import StoreStats

EXTENSION = "mooncake_engine.pool_connector:PoolExtension"
"""As an executor takes it."""


def check_pool(config: KVPoolConfig, block_size: int) -> None:
    """Refuse chunks that are no whole blocks.

    Raises:
        ConfigError: says both sizes.
    """
    if config.chunk_tokens % block_size:
        raise ConfigError(
            f"--kv-pool: a chunk has {config.chunk_tokens} tokens, which are no whole blocks of "
            f"{block_size}: use chunk=N with a multiple of the block size, the same for all "
            "instances that share KV"
        )


def open_stores(
    config: KVPoolConfig, registry: Registry, name: str, kv_events: KVEventsConfig | None
) -> PoolStores:
    """The stores of an instance of that name; its own one publishes KV events as told.

    Raises:
        ConfigError: a store can't be had as asked.
    """
    with engine_errors():
        return PoolStores(config, registry, name, kv_events)


class SchedulerPool:
    """The pool, as the scheduler and the core hold it; see ``ChunkPool``.

    Args:
        config: of the pool.
        stores: of the instance, opened; data-parallel ranks share them. They are closed with the
            first of these, when all ranks have ended.
        identity: of this model's KV.
        geometry: the same.
        num_ranks: of the data-parallel rank whose pool it is.
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
    def home_location(self) -> StoreLocation | None:
        return self._stores.home_location

    @property
    def store_stats(self) -> StoreStats | None:
        return self._stores.own_stats()

    @property
    def publishes_saves(self) -> bool:
        return self._stores.tells_what_is_saved

    @property
    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        found = self._stores.home_kv_events
        return found and msgspec.structs.replace(found, namespace=self._identity.root().hex())

    def start(
        self,
        send: Callable[[bytes, int], None],
        post: Callable[[PoolEvent | ConnectorFailed], None],
    ) -> None:
        """Wait for the ranks, and begin.

        Args:
            send: carries a message to a rank, as ``Executor.send``.
            post: takes events.

        Raises:
            ConfigError: a rank did not come up.
        """
        with engine_errors():
            self._client.start(
                lambda rank, message: send(message, rank),
                post,
                lambda dead: post(ConnectorFailed(dead)),
            )

    def keys(self, request: Request, num_chunks: int) -> list[bytes]:
        chain = request.chunk_chain
        if len(chain) < num_chunks:
            size = self.chunk_tokens
            parent = chain[-1] if chain else self._identity.root(request.spec.cache_salt)
            tokens = request.token_ids[len(chain) * size : num_chunks * size]
            chain += extend_keys(self._identity, parent, tokens)
        return chain[:num_chunks]


class PoolExtension:
    """A rank's half of the pool, as an extension beside its KV memory; see ``WorkerExtension``."""

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
        """Before a layer reads KV, the step waits for the loads of the requests that it runs; once
        a layer is written, what the step completes of it is saved."""
        completes = self._completes_chunks(plan)
        if not completes and not self._worker.has_loads:
            return None
        names = {sequence.request_id for sequence in plan.sequences}
        return self._worker.begin_step(plan.step, names, completes_chunks=completes)

    def _completes_chunks(self, plan: StepPlan) -> bool:
        for sequence in reversed(plan.sequences):
            if sequence.count == 1:  # so are all before it
                return False
            stop = sequence.start + sequence.count
            if completes_chunks(sequence.start, stop, self._chunk_tokens):
                return True
        return False
