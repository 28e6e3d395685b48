"""The scheduler side of the KVCache pool's connector: loads the chunks that stores have, and saves
what is computed.

A prompt's chunks are looked up when the request arrives, and again, together with those of its
answer, after a preemption; vLLM keeps asking until the stores have answered. If a load finds fewer
chunks than the look-up did, it has failed, as far as vLLM is concerned.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path

from mooncake_hal.registry import Registry
from mooncake_kv.connector_worker import LayerDone, PushStep, RankContext
from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events import KVEvent
from mooncake_kv.params import KVTransferDict
from mooncake_kv.pool.pool_client import PoolClient
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_kv.pool.pool_events import (
    ChunksCopied,
    ChunksFound,
    ChunkSource,
    LoadRequest,
    PoolEvent,
    PoolLoadEnded,
)
from mooncake_kv.pool.pool_messages import CancelRuns, LayersArrived, LoadRuns, decode_to_rank
from mooncake_kv.pool.pool_stores import PoolStores, fitting_sources
from mooncake_kv.pool.pool_worker import PoolWorker
from mooncake_kv.store.chunk_keys import KVIdentity, num_loadable_chunks
from mooncake_kv.store.store_events import StoreEventBuffer
from mooncake_vllm.rank_link import ReportLoad, ReportSend
from mooncake_vllm.vllm_interface import (
    DISK,
    HOST,
    UNSPECIFIED,
    BlockPool,
    KVCacheBlocks,
    Request,
    SchedulerOutput,
)
from mooncake_vllm.vllm_memory import join_tables
from mooncake_vllm.vllm_pool_saves import PoolSaves, count_tokens, num_plain_tokens
from mooncake_vllm.vllm_scheduler_base import Instance, SchedulerSideBase
from mooncake_vllm.vllm_scheduler_side import rope_order
from mooncake_vllm.vllm_window_blocks import WindowBlocks
from mooncake_vllm.vllm_worker_side import LoadOrder, WorkerKind

logger = logging.getLogger(__name__)

PUBLISHED_STATS = (
    "num_lookups", "num_queried_chunks", "num_found_chunks", "num_loads", "num_failed_loads",
    "num_loaded_chunks", "loaded_bytes", "load_seconds", "num_saves", "num_saved_chunks",
    "saved_bytes", "num_save_refusals",
)  # fmt: skip
"""The fields of ``PoolStats`` that are published as vLLM metrics."""
HIT_SOURCE_OF = {"dram": HOST, "ssd": DISK}
"""What vLLM calls the tiers of the first store; it doesn't tell others apart."""
LOOK_UP_TIMEOUT_S = 2.0
"""Seconds that a request waits for its look-up before it runs without one."""
REFUSED = "FINISHED_ERROR"
"""Finish status of a request whose load failed, if ``kv_load_failure_policy`` is ``fail``."""


class PoolState(Enum):
    """State of a prompt's look-up or load."""

    LOOKING_UP = auto()
    FOUND = auto()
    LOADING = auto()
    FINISHED = auto()
    """Loaded, failed, or nothing to load."""


@dataclass(slots=True)
class PooledPrompt:
    """The look-up and load of a request's prompt, or, after a preemption, of all its tokens.

    Args:
        request_id: the request.
        name: name of the look-up and the load.
        keys: keys of the chunks that may be loaded.
        num_preemptions: the request's number of preemptions before the look-up.
        deadline: until when the request waits for the look-up.
        state: the state.
        sources: locations of the leading chunks that stores have.
        has_failed: whether fewer chunks were loaded than the look-up had found.
    """

    request_id: str
    name: str
    keys: list[bytes]
    num_preemptions: int
    deadline: float
    state: PoolState = PoolState.LOOKING_UP
    sources: Sequence[ChunkSource] = ()
    has_failed: bool = False


class PoolSchedulerSide(SchedulerSideBase):
    """Loads prompts from stores, and saves what was computed.

    Args:
        config: the stores and the network.
        instance: properties of this instance.
        paths: Unix sockets of the workers, by rank.
        takes_events: whether vLLM publishes KV events, so that ``take_events`` is called.

    Raises:
        KVConfigError: the ranks did not connect or differ in their KV, or a store can't be opened
            as configured.
    """

    def __init__(
        self,
        config: KVPoolConfig,
        instance: Instance,
        paths: Sequence[Path],
        *,
        takes_events: bool = False,
    ) -> None:
        self._events = StoreEventBuffer() if takes_events else None
        self._block_pool: BlockPool | None = None
        self._cached_blocks: object = None
        self._has_warned = False
        self._lock = threading.Lock()
        self._by_request: dict[str, PooledPrompt] = {}  # of requests that have not ended
        # These, and the loads of ended requests until their end is reported.
        self._by_name: dict[str, PooledPrompt] = {}
        self._count = 0
        self._chunk_tokens = config.chunk_tokens
        self._timeout_s = config.network.transfer_timeout_s
        super().__init__(instance, paths)
        try:
            self._client = self._open(config, instance)
        except BaseException:
            self._ranks.close()
            raise
        self._saves = PoolSaves(
            self._client,
            self._blocks_per_page,
            self._windows,
            publishes_tokens=lambda: self._stores.publishes_saves,
            report=lambda request_id: self._ranks.report(ReportSend(request_id)),
        )

    def _open(self, config: KVPoolConfig, instance: Instance) -> PoolClient:
        info = self._ranks.info
        self._blocks_per_page = info.blocks_per_page
        unit = max(info.block_size, info.geometry.unit)
        if config.chunk_tokens % unit:
            raise KVConfigError(
                f"pool: a chunk has {config.chunk_tokens} tokens, which is not a multiple of a "
                f"block's {unit}: use chunk=N with a multiple, the same for all instances that "
                "share KV"
            )
        self._windows = WindowBlocks(
            info.geometry.tables, config.chunk_tokens, info.block_size * info.blocks_per_page
        )
        self._identity = KVIdentity.of_model(
            instance.model, info.geometry, config.chunk_tokens, rope_order(info)
        )
        self._stores = PoolStores(
            config, Registry.discover(), instance.engine_id, observer=self._events
        )
        client = PoolClient(
            self._stores, info.geometry, self._identity, self._timeout_s, len(self._ranks)
        )
        try:
            # For `--store-kv-events` of a proxy, if a store has the KV of several models.
            logger.info("the pool's events have the namespace %s", client.namespace.hex())
            self._ranks.listen(client.on_rank_message)
            client.start(self._ranks.send, self._on_event, self._die, self._steps.has_stalled)
        except BaseException:
            client.close()
            raise
        return client

    # ------------------------------------------------------------- vLLM's hooks

    def on_new_request(self, request: Request) -> None:
        """Process a new request: look up its prompt, unless all of it has to be computed."""
        self.check_alive()
        if self.is_waiting or self.needs_steps:
            self._ranks.wake_up()
        self._saves.add(request, self._identity)
        if not request.skip_reading_prefix_cache:
            self._look_up(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Number of tokens that a request can load beyond its computed ones; None: ask again.
        Repeated calls return the same."""
        self.check_alive()
        pooled = self._by_request.get(request.request_id)
        if pooled is None or pooled.state is PoolState.LOADING:
            return 0
        is_old = pooled.state is not PoolState.LOOKING_UP
        if is_old and request.num_preemptions > pooled.num_preemptions:
            pooled = self._look_up(request) or pooled
        if time.monotonic() >= pooled.deadline:
            self._found(pooled, ())  # ignored if the stores have answered
        with self._lock:
            if pooled.state is PoolState.LOOKING_UP:
                return None
            if pooled.state is not PoolState.FOUND:
                return 0
            # vLLM fails a request, or computes all of it, if fewer chunks are loaded than promised.
            first = num_computed // self._chunk_tokens
            stores, chunk_bytes = self._stores.all, self._client.chunk_bytes
            pooled.sources = fitting_sources(pooled.sources, first, stores, chunk_bytes)
            return max(0, len(pooled.sources) * self._chunk_tokens - num_computed)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_tokens: int
    ) -> None:
        """Load a number of tokens into a request's new blocks; with 0, the request runs without
        a load. Once it loads, vLLM waits for a report, so every failure must send one."""
        with self._lock:
            pooled = self._by_request.get(request.request_id)
            if pooled is None or pooled.state is not PoolState.FOUND:
                return
            pooled.state = PoolState.LOADING if num_tokens else PoolState.FINISHED
        self._saves.note_known(request.request_id, len(pooled.sources))
        if not num_tokens:  # vLLM's own cache has them, or another connector loads them
            self._client.touch(pooled.keys[: len(pooled.sources)])
            return
        self._started.append(pooled.name)
        try:
            self._start_load(request, pooled, blocks, num_tokens)
        except BaseException as exc:
            self._load_ended(PoolLoadEnded(pooled.name, 0, f"it can't be started: {exc!r}"))
            raise

    def hit_sources(self, request: Request, num_tokens: int) -> dict[str, int]:
        """Where the tokens that a request loads come from, see ``HIT_SOURCES``."""
        with self._lock:
            sources = self._by_request[request.request_id].sources
        first, counts = len(sources) * self._chunk_tokens - num_tokens, Counter[str]()
        for chunk, source in enumerate(sources):
            missing = (chunk + 1) * self._chunk_tokens - max(0, first)
            tier = HIT_SOURCE_OF.get(source.name, UNSPECIFIED)
            counts[tier] += min(self._chunk_tokens, max(0, missing))
        counts[UNSPECIFIED] += num_tokens - counts.total()  # of a load that has failed already
        return counts

    @property
    def is_waiting(self) -> bool:
        """Whether the end of a load, or the release of saved blocks, is still to be reported."""
        with self._lock:
            is_loading = any(each.state is PoolState.LOADING for each in self._by_name.values())
        return is_loading or self._saves.is_holding

    @property
    def needs_steps(self) -> bool:
        """Whether blocks of sliding windows are held, which the next steps save or release. Until
        then vLLM can't reset its prefix cache."""
        return self._windows.num_held > 0

    def push_steps(self, step: SchedulerOutput) -> tuple[PushStep, ...]:
        """Save the chunks that earlier steps have computed; nothing is pushed to a peer."""
        self._saves.process_step(step)
        return ()

    def request_finished(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, KVTransferDict | None]:
        """Process the end of a request; returns whether its blocks are held until a report, and no
        parameters for its answer."""
        self.check_alive()
        with self._lock:
            pooled = self._by_request.pop(request.request_id, None)
            is_loading = pooled is not None and pooled.state is PoolState.LOADING
            if pooled is not None and not is_loading:
                del self._by_name[pooled.name]
        if pooled is not None and pooled.has_failed and request.status.name == REFUSED:
            self._warn_of_policy(request.request_id)
        is_held = self._saves.end(request, tables)
        if pooled is not None and is_loading:
            self._client.cancel_load(pooled.name)
        return is_held, None

    def reset_cache(self) -> bool:
        """Reset the cache, as vLLM does when its weights change: the chunks that stores have are no
        longer loaded, and requests in flight are not saved. Returns False while a load is running.

        The chunks stay in the stores, as other instances use them. This instance shares nothing
        with those from now on, since it can't know whether they have the same weights.
        """
        with self._lock:
            self._identity = replace(self._identity, model=secrets.token_hex(16))
            self._client.namespace = self._identity.root()
            self._saves.forget()
            found = [each for each in self._by_name.values() if each.state is not PoolState.LOADING]
            for pooled in found:
                pooled.state, pooled.sources = PoolState.FINISHED, ()
            return len(found) == len(self._by_name)

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Hold blocks of sliding windows in vLLM's pool, and watch its cache for resets. The event
        of a reset names no tier, so subscribers drop the store's chunks, too."""
        self._windows.bind(pool)
        self._block_pool, self._cached_blocks = pool, pool.cached_block_hash_to_block

    def take_events(self) -> Sequence[KVEvent]:
        """Return the changes of this instance's own store since the last call. After a reset of
        vLLM's own cache, return everything that the store holds; vLLM takes its own events first.
        A store that runs elsewhere publishes its own events.

        vLLM calls this when it has a step's results, and may then idle: so this also returns the
        blocks whose copies have ended."""
        self._steps.end()
        self._windows.free_released()
        if self._events is None:
            return ()
        if self._block_pool is not None:
            cached_blocks = self._block_pool.cached_block_hash_to_block
            if cached_blocks is not self._cached_blocks:
                self._cached_blocks = cached_blocks
                self._events.publish_again()
        return self._events.take(self._client.namespace)

    def stats(self) -> dict[str, float]:
        """Metrics by name, since the start."""
        counted = asdict(self._client.stats.snapshot())
        metrics = {f"pool_{name}": stats_value(counted[name]) for name in PUBLISHED_STATS}
        metrics |= {
            f"pool_{name}/{transport}": float(nbytes)
            for name in ("loaded_bytes_by_transport", "saved_bytes_by_transport")
            for transport, nbytes in counted[name].items()
        }
        return metrics | {
            "pool_num_unheld_chunks": float(self._windows.num_dropped),
            "pool_saves_in_flight": float(self._saves.num_in_flight),
            "pool_num_stores": float(len(self._stores.all)),
            "pool_num_connected_stores": float(self._stores.num_connected),
        }

    def close(self) -> None:
        """Stop, abandoning loads and saves. Idempotent.

        No rank may still write into a store: vLLM ends its workers before its scheduler.
        """
        self._client.close()
        self._ranks.close()

    # ------------------------------------------------------------- the rest

    def _look_up(self, request: Request) -> PooledPrompt | None:
        """Look up a request's chunks in the stores; returns None if none of them could be
        loaded."""
        self._saves.note_known(request.request_id, 0)  # an earlier look-up's may be evicted
        num_keys = min(
            num_loadable_chunks(count_tokens(request), self._chunk_tokens),
            num_plain_tokens(request) // self._chunk_tokens,
        )
        keys = self._saves.first_keys(request.request_id, num_keys)
        if not keys:
            return None
        self._count += 1
        request_id = request.request_id
        name = f"{request_id} {self._count}"
        deadline = time.monotonic() + LOOK_UP_TIMEOUT_S
        pooled = PooledPrompt(request_id, name, keys, request.num_preemptions, deadline)
        with self._lock:
            if (earlier := self._by_request.get(request_id)) is not None:
                del self._by_name[earlier.name]
            self._by_request[request_id] = self._by_name[name] = pooled
        try:
            sources = self._client.lookup(pooled.name, pooled.keys)
        except BaseException:
            self._found(pooled, ())  # vLLM would ask for its result for ever
            raise
        if sources is not None:
            self._found(pooled, sources)
        return pooled

    def _start_load(
        self, request: Request, pooled: PooledPrompt, blocks: KVCacheBlocks, num_tokens: int
    ) -> None:
        count = len(pooled.sources)
        start = count * self._chunk_tokens - num_tokens
        self._client.start_load(
            LoadRequest(
                pooled.name,
                request.request_id,
                pooled.keys[:count],
                pooled.sources,
                first_chunk=start // self._chunk_tokens,
                skipped_tokens=start % self._chunk_tokens,
                block_ids=join_tables(blocks.get_block_ids(), self._blocks_per_page),
                timeout_s=self._timeout_s,
                release_layers=None,  # vLLM runs a request only once its whole load is complete
            )
        )

    def _found(self, pooled: PooledPrompt, sources: Sequence[ChunkSource]) -> None:
        with self._lock:
            if pooled.state is PoolState.LOOKING_UP:
                pooled.sources = sources
                pooled.state = PoolState.FOUND if sources else PoolState.FINISHED

    def _on_event(self, event: PoolEvent) -> None:
        """Process an event of the pool's client, on the client's thread."""
        if isinstance(event, ChunksFound):
            with self._lock:
                pooled = self._by_name.get(event.load_id)
            if pooled is not None:
                self._found(pooled, event.sources)
                self._ranks.wake_up()  # vLLM asked too early, and asks again in its next step
        elif isinstance(event, PoolLoadEnded):
            self._load_ended(event)
        elif isinstance(event, ChunksCopied):
            self._saves.copied(event)

    def _load_ended(self, event: PoolLoadEnded) -> None:
        with self._lock:
            pooled = self._by_name.get(event.load_id)
            if pooled is None:
                return
            has_ended = self._by_request.get(pooled.request_id) is not pooled
            is_failed = event.num_chunks < len(pooled.sources)
            pooled.state = PoolState.FINISHED
            if is_failed:
                pooled.has_failed, pooled.sources = True, pooled.sources[: event.num_chunks]
            if has_ended:
                del self._by_name[pooled.name]
        if is_failed:
            reason = event.error or "the stores no longer have all of its chunks"
            logger.info("%s: loading KV from the pool failed: %s", event.load_id, reason)
        if is_failed and not has_ended:
            self._saves.note_known(pooled.request_id, event.num_chunks)
        self._ranks.report(ReportLoad(pooled.request_id, event.load_id, is_failed))

    def _warn_of_policy(self, request_id: str) -> None:
        """Warn, once, of the load failure policy. Not at the start, because a MultiConnector's
        child can't know which policy is in force."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s was answered with an error, because its stores no longer have the chunks that "
                "they had at the look-up: with the kv_load_failure_policy recompute it would have "
                "been recomputed (in a MultiConnector its own policy counts, not those of its "
                "connectors)",
                request_id,
            )


class PoolRank:
    """The pool's worker of a rank, which does not need a step's layers.

    Args:
        context: the rank's memory, and its link to the scheduler side.
    """

    def __init__(self, context: RankContext) -> None:
        self._worker = PoolWorker(context)
        self.receive, self.close = self._worker.receive, self._worker.close

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        """Nothing to do: returns no callback."""
        return None

    def end_step(self) -> None:
        """Nothing to do."""


def _load_of(order: bytes) -> LoadOrder | None:
    message = decode_to_rank(order)
    if not isinstance(message, LoadRuns | LayersArrived | CancelRuns):
        return None
    return LoadOrder(message.load_id, begins=isinstance(message, LoadRuns))


POOL_WORKER = WorkerKind(PoolRank, _load_of)


def stats_value(value: object) -> float:
    """Convert a counter to a number; a counter by reason is summed up."""
    return float(sum(value.values()) if isinstance(value, dict) else value)  # type: ignore[arg-type]  # numbers
