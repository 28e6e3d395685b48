"""The KVCache pool beside vLLM's scheduler: what stores have is loaded, what is computed is saved.

A prompt's chunks are looked up when it arrives; vLLM asks again until the stores have answered. A
load that finds less than the look-up promised has failed, as vLLM sees it. What a request has
computed is saved when it ends: its blocks stay until they are copied, so that nobody else can have
written them meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path

from mooncake_hal.registry import Registry
from mooncake_kv.connector_worker import LayerDone, PushStep, RankContext
from mooncake_kv.errors import ConnectorDead, KVConfigError
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
    SaveRequest,
)
from mooncake_kv.pool.pool_messages import CancelRuns, LayersArrived, LoadRuns, decode_to_rank
from mooncake_kv.pool.pool_stores import PoolStores
from mooncake_kv.pool.pool_worker import PoolWorker
from mooncake_kv.store.chunk_keys import KVIdentity, chunk_keys, num_loadable_chunks
from mooncake_kv.store.chunk_store import MAX_TENANT_BYTES
from mooncake_kv.store.store_events import StoreEventBuffer
from mooncake_vllm.errors import ConnectorDied
from mooncake_vllm.rank_link import Ranks, ReportLoad, ReportSend
from mooncake_vllm.vllm_interface import BlockPool, KVCacheBlocks, Request, SchedulerOutput
from mooncake_vllm.vllm_memory import expand_blocks
from mooncake_vllm.vllm_scheduler_side import Instance, rope_order
from mooncake_vllm.vllm_worker_side import LoadOrder, WorkerKind

logger = logging.getLogger(__name__)

FIGURES = (
    "num_lookups", "num_queried_chunks", "num_found_chunks", "num_loads", "num_failed_loads",
    "num_loaded_chunks", "loaded_bytes", "load_seconds", "num_saves", "num_saved_chunks",
    "saved_bytes", "num_save_refusals",
)  # fmt: skip
"""Of ``PoolStats``, those that vLLM publishes."""
SAVED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Endings after which all steps of a request are over but for its last token's."""
CUT_OFF = "FINISHED_ABORTED"
"""Ending of a request whose client has left, or whose text had a stop string: at any time."""


class PoolState(Enum):
    """Where a prompt's look-up or load stands."""

    LOOKING = auto()
    FOUND = auto()
    LOADING = auto()
    OVER = auto()
    """Loaded, failed, or nothing to load."""


@dataclass(slots=True)
class PooledPrompt:
    """What the pool knows of a request's prompt.

    Args:
        name: of its look-up and its load.
        keys: of its chunks that may be loaded.
        sources: of the leading ones that stores have, where.
    """

    name: str
    keys: list[bytes]
    state: PoolState = PoolState.LOOKING
    sources: Sequence[ChunkSource] = ()


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A request's, after it came or was preempted.

    Args:
        num_preemptions: before it.
        num_had: tokens whose KV was there then, or will be when that step has ended.
    """

    num_preemptions: int
    num_had: int


class PoolSchedulerSide:
    """Loads prompts from stores, and saves what was computed.

    Args:
        config: which stores.
        instance: this one.
        paths: where its workers listen.
        takes_events: whether somebody calls ``take_events``.

    Raises:
        KVConfigError: the ranks did not come up or differ, or a store can't be had as asked.
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
        self._death: BaseException | None = None
        self._lock = threading.Lock()
        self._prompts: dict[str, PooledPrompt] = {}
        self._saving: set[str] = set()
        self._current: dict[str, Request] = {}  # those whose KV is all of this identity
        self._first_steps: dict[str, FirstStep] = {}  # of current requests
        self._started: list[str] = []
        self._count = 0
        self._chunk_tokens = config.chunk_tokens
        self._timeout_s = config.network.transfer_timeout_s
        self._ranks = Ranks(paths, self._on_death)
        try:
            self._client = self._open(config, instance)
        except BaseException:
            self._ranks.close()
            raise

    def _open(self, config: KVPoolConfig, instance: Instance) -> PoolClient:
        info = self._ranks.info
        self._pages = info.blocks_per_page
        unit = max(info.block_size, info.geometry.unit)
        if config.chunk_tokens % unit:
            raise KVConfigError(
                f"pool: a chunk has {config.chunk_tokens} tokens, which are no whole blocks of "
                f"{unit}: use chunk=N with a multiple, the same for all who share KV"
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
            self._ranks.listen(client.on_rank_message)
            client.start(self._ranks.send, self._on_event, self._fail)
        except BaseException:
            client.close()
            raise
        return client

    # ------------------------------------------------------------- vLLM's hooks

    def on_new_request(self, request: Request) -> None:
        """A request has come: look its prompt up."""
        self.check_alive()
        if self.is_waiting:
            self._ranks.wake_up()
        prompt = request.prompt_token_ids or []
        count = num_loadable_chunks(len(prompt), self._chunk_tokens)
        with self._lock:
            self._current[request.request_id] = request
        if not count or not _is_plain(request):
            return
        self._count += 1
        pooled = PooledPrompt(
            f"{request.request_id} {self._count}", self._keys(request, prompt)[:count]
        )
        with self._lock:
            self._prompts[request.request_id] = pooled
        sources = self._client.lookup(pooled.name, pooled.keys)
        if sources is not None:
            self._found(pooled, sources)

    def num_to_load(self, request: Request, num_computed: int) -> int | None:
        """Tokens that a request can load beyond those; None: ask again. No side effects."""
        self.check_alive()
        with self._lock:
            pooled = self._prompts.get(request.request_id)
            if pooled is None or pooled.state in (PoolState.LOADING, PoolState.OVER):
                return 0
            if pooled.state is PoolState.LOOKING:
                return None
            return max(0, len(pooled.sources) * self._chunk_tokens - num_computed)

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """A request has blocks: load that many tokens; with 0 it runs on what it has."""
        with self._lock:
            pooled = self._prompts.get(request.request_id)
            if pooled is None or pooled.state is not PoolState.FOUND:
                return
            pooled.state = PoolState.LOADING if num_tokens else PoolState.OVER
        if not num_tokens:  # it is in vLLM's own cache, or comes from elsewhere
            self._client.touch(pooled.keys[: len(pooled.sources)])
            return
        count = len(pooled.sources)
        start = count * self._chunk_tokens - num_tokens
        [table] = blocks.get_block_ids()
        self._started.append(pooled.name)
        self._client.start_load(
            LoadRequest(
                pooled.name,
                request.request_id,
                pooled.keys[:count],
                pooled.sources,
                start // self._chunk_tokens,
                start % self._chunk_tokens,
                expand_blocks(table, self._pages),
                self._timeout_s,
                release_layers=None,  # vLLM runs a request once all of it is there
            )
        )

    def take_started(self) -> tuple[str, ...]:
        """The loads that were started since the last call, for the next step's metadata."""
        self.check_alive()
        started, self._started = tuple(self._started), []
        return started

    @property
    def is_waiting(self) -> bool:
        """Whether the end of a load is still to be reported, or blocks that are saved."""
        with self._lock:
            is_loading = (each.state is PoolState.LOADING for each in self._prompts.values())
            return bool(self._saving) or any(is_loading)

    def push_steps(self, step: SchedulerOutput) -> tuple[PushStep, ...]:
        """Nothing is sent while it is computed; notes which requests begin to run."""
        for new in step.scheduled_new_reqs:
            self._note_first_step(new.req_id, new.num_computed_tokens)
        known = step.scheduled_cached_reqs
        if known.resumed_req_ids:
            for name, num_computed in zip(known.req_ids, known.num_computed_tokens, strict=True):
                if name in known.resumed_req_ids:
                    self._note_first_step(name, num_computed)
        return ()

    def request_finished(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, KVTransferDict | None]:
        """A request has ended: whether its blocks stay until a report; its answer says nothing."""
        self.check_alive()
        request_id = request.request_id
        with self._lock:
            is_current = self._current.pop(request_id, None) is not None
            first_step = self._first_steps.pop(request_id, None)
            pooled = self._prompts.pop(request_id, None)
            is_loading = pooled is not None and pooled.state is PoolState.LOADING
            if pooled is not None and is_loading:
                self._prompts[f"ended {pooled.name}"] = pooled  # until its end is reported
        if pooled is not None and is_loading:
            self._client.cancel_load(pooled.name)
            return False, None
        if not is_current or not _is_plain(request):
            return False, None
        num_certain = num_certain_tokens(request, first_step)
        [table] = tables
        num_known = len(pooled.sources) if pooled else 0
        return self._save(request, table, num_known, num_certain // self._chunk_tokens), None

    def reset_cache(self) -> bool:
        """vLLM empties its caches, as it does for other weights: no chunk that stores have is
        loaded any more, and no request that is under way is saved. False while one is loading.

        Stores keep what other instances use; this one shares nothing with them from now on, as it
        can't know whether they have its weights.
        """
        with self._lock:
            self._identity = replace(self._identity, model=secrets.token_hex(16))
            self._client.namespace = self._identity.root()
            self._current.clear()
            self._first_steps.clear()
            found = [each for each in self._prompts.values() if each.state is not PoolState.LOADING]
            for pooled in found:
                pooled.state, pooled.sources = PoolState.OVER, ()
            return len(found) == len(self._prompts)

    def bind_block_pool(self, pool: BlockPool) -> None:
        """vLLM's own cache. An event that it was reset names no tier, and so takes back a store's
        chunks, too, for all who read it."""
        self._block_pool, self._cached_blocks = pool, pool.cached_block_hash_to_block

    def take_events(self) -> Sequence[KVEvent]:
        """What has changed in this instance's own store since the last call, or all that is there
        after a reset of vLLM's own cache, whose events vLLM takes first. A store that runs
        elsewhere publishes by itself."""
        if self._events is None:
            return ()
        if self._block_pool is not None:
            cached_blocks = self._block_pool.cached_block_hash_to_block
            if cached_blocks is not self._cached_blocks:
                self._cached_blocks = cached_blocks
                self._events.tell_again()
        return self._events.take(self._client.namespace)

    def check_alive(self) -> None:
        """Raise what has killed the pool's client.

        Raises:
            ConnectorDied: it can't go on.
        """
        if self._death is not None:
            raise ConnectorDied(f"the pool has died: {self._death!r}") from self._death

    def stats(self) -> dict[str, float]:
        """Figures by name, since the start."""
        counted = asdict(self._client.stats)
        figures = {f"pool_{name}": stats_value(counted[name]) for name in FIGURES}
        return figures | {"pool_saves_under_way": float(len(self._saving))}

    def close(self) -> None:
        """Give up what is loading or saved. Idempotent.

        No rank may write into a store any more: vLLM ends its workers before its scheduler.
        """
        self._client.close()
        self._ranks.close()

    # ------------------------------------------------------------- the rest

    def _keys(self, request: Request, tokens: Sequence[int]) -> list[bytes]:
        return chunk_keys(self._identity, tokens, tenant_salt=request.cache_salt or "")

    def _note_first_step(self, request_id: str, num_had: int) -> None:
        with self._lock:
            if (request := self._current.get(request_id)) is not None:
                self._first_steps[request_id] = FirstStep(request.num_preemptions, num_had)

    def _save(
        self, request: Request, block_ids: Sequence[int], num_known: int, num_whole: int
    ) -> bool:
        """Begin to save chunks from ``num_known`` to ``num_whole``; whether the blocks have to
        stay."""
        if num_whole <= num_known:
            return False
        tokens = [*(request.prompt_token_ids or []), *request.output_token_ids]
        keys = self._keys(request, tokens[: num_whole * self._chunk_tokens])
        salt = request.cache_salt or ""
        tenant = salt if len(salt.encode()) <= MAX_TENANT_BYTES else ""
        blocks = expand_blocks(block_ids, self._pages)
        save = SaveRequest(request.request_id, keys, num_known, blocks, tenant)
        if self._stores.tells_what_is_saved and tenant == salt:
            size = self._chunk_tokens
            save = replace(save, token_ids=tokens[num_known * size : num_whole * size])
        self._saving.add(request.request_id)
        if self._client.save(save):
            return True
        self._saving.discard(request.request_id)
        return False

    def _found(self, pooled: PooledPrompt, sources: Sequence[ChunkSource]) -> None:
        with self._lock:
            if pooled.state is PoolState.LOOKING:
                pooled.sources = sources
                pooled.state = PoolState.FOUND if sources else PoolState.OVER

    def _on_event(self, event: PoolEvent) -> None:
        """What the pool's client has to say. Its own thread."""
        if isinstance(event, ChunksFound):
            if (found := self._by_name(event.load_id)) is not None:
                self._found(found[1], event.sources)
                self._ranks.wake_up()  # vLLM asked too early, and asks again with its next step
        elif isinstance(event, PoolLoadEnded):
            self._load_ended(event)
        elif isinstance(event, ChunksCopied):
            if event.is_complete:  # vLLM has kept the blocks
                self._client.end_save(event.save_id, is_right=True)
            self._saving.discard(event.save_id)
            self._ranks.report(ReportSend(event.save_id))

    def _load_ended(self, event: PoolLoadEnded) -> None:
        found = self._by_name(event.load_id)
        if found is None:
            return
        key, pooled = found
        is_failed = event.num_chunks < len(pooled.sources)
        with self._lock:
            pooled.state = PoolState.OVER
            if is_failed:
                pooled.sources = pooled.sources[: event.num_chunks]
            if key.startswith("ended "):
                del self._prompts[key]
        if is_failed:
            logger.info("%s: the pool's KV did not come: %s", event.load_id, event.error)
        request_id = event.load_id.rpartition(" ")[0]
        self._ranks.report(ReportLoad(request_id, event.load_id, is_failed))

    def _by_name(self, name: str) -> tuple[str, PooledPrompt] | None:
        with self._lock:
            for key in (name.rpartition(" ")[0], f"ended {name}"):
                pooled = self._prompts.get(key)
                if pooled is not None and pooled.name == name:
                    return key, pooled
        return None

    def _fail(self, dead: ConnectorDead) -> None:
        self._death = self._death or dead

    def _on_death(self, reason: str) -> None:
        self._death = self._death or ConnectorDied(reason)


class PoolRank:
    """A rank's half: nothing of it follows a step's layers.

    Args:
        context: the rank's memory, and its way to the scheduler side.
    """

    def __init__(self, context: RankContext) -> None:
        self._worker = PoolWorker(context)
        self.receive, self.close = self._worker.receive, self._worker.close

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        """Nothing waits for layers."""
        return None

    def end_step(self) -> None:
        """Nothing waits for a step's end."""


def _load_of(order: bytes) -> LoadOrder | None:
    message = decode_to_rank(order)
    if not isinstance(message, LoadRuns | LayersArrived | CancelRuns):
        return None
    return LoadOrder(message.load_id, begins=isinstance(message, LoadRuns))


POOL_WORKER = WorkerKind(PoolRank, _load_of)


def _is_plain(request: Request) -> bool:
    """Whether token ids and salt say all that the KV of a request depends on."""
    return (
        request.lora_request is None and request.prompt_embeds is None and not request.mm_features
    )


def num_certain_tokens(request: Request, first_step: FirstStep | None) -> int:
    """Leading tokens of a request that has ended whose KV is surely there.

    Args:
        request: which.
        first_step: its last one; None: it never ran.
    """
    num_tokens = len(request.prompt_token_ids or []) + len(request.output_token_ids)
    # The last token's own KV may not be computed, or by a step that has yet to end.
    if request.status.name in SAVED:
        return min(request.num_computed_tokens, num_tokens - 1)
    if request.status.name != CUT_OFF or first_step is None:
        return 0
    num_ended = request.num_computed_tokens - request.num_in_flight_tokens
    # Else what it had may be on its way: it waits for a load, or the step that brings it goes on.
    has_run = num_ended > first_step.num_had
    if not has_run or request.num_preemptions != first_step.num_preemptions:
        return 0
    return min(num_ended, num_tokens - 1)


def stats_value(value: object) -> float:
    """A figure, or the sum of those by reason."""
    return float(sum(value.values()) if isinstance(value, dict) else value)  # type: ignore[arg-type]  # numbers
