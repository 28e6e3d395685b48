"""An instance's client of the pool, beside its scheduler: look-ups, loads and saves of all ranks.

    look-up   probe every store                                       -> ChunksFound
    load      pin, all ranks read, release: still in force?           -> LoadReleased, PoolLoadEnded
    save      reserve, all ranks write                                -> ChunksCopied
              the core says whether the blocks were unchanged: commit or abort

Calls return at once; the work runs on an asyncio loop in the client's own thread. All failures are
misses: a load ends with fewer chunks, a save is not stored. Only a load whose end a rank does not
report ends the instance, because that rank may still write to KV blocks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from mooncake_hal.kv.geometry import KVGeometry
from mooncake_hal.session.processes import ProcessName
from mooncake_kv.connector import HasStalled, never_stalls
from mooncake_kv.errors import ConnectorDead, KVConfigError, KVTransferError
from mooncake_kv.io_loop import IoLoop
from mooncake_kv.params import PrefixSource
from mooncake_kv.pool.hinted_stores import HintedStores
from mooncake_kv.pool.pinned_chunks import PinnedChunks, pin_chunks
from mooncake_kv.pool.pool_costs import LoadCosts
from mooncake_kv.pool.pool_events import (
    ChunksCopied,
    ChunksFound,
    ChunkSource,
    LoadReleased,
    LoadRequest,
    PoolLoadEnded,
    PoolStats,
    PostPoolEvent,
    SaveRequest,
    nearest_sources,
)
from mooncake_kv.pool.pool_messages import (
    CancelRuns,
    ChunkRun,
    LayersArrived,
    LayersLoaded,
    LoadRuns,
    PlacedChunk,
    PoolRankReady,
    RunsEnded,
    SaveRuns,
    add_by_transport,
    consecutive_runs,
    decode_from_rank,
)
from mooncake_kv.pool.pool_stores import PoolStores, held_elsewhere, store_to_save_to
from mooncake_kv.pool.rank_orders import RankOrders
from mooncake_kv.ranks import SendToRank
from mooncake_kv.store.chunk_keys import KVIdentity
from mooncake_kv.store.chunk_layout import chunk_bytes
from mooncake_kv.store.chunk_store import ChunkStore, PutRefusal, Residence, Tier, WriteHandle

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Seconds that ``start`` waits for the ranks."""
LEASE_MARGIN_S = 5.0
"""Seconds by which the lease of a handle exceeds the timeout of its transfers."""
VERDICT_TIMEOUT_S = 30.0
"""Seconds that a copied save waits for ``end_save``; it is aborted after that."""
MAX_SAVES = 512
"""Upper bound of the saves queued or in flight, which take a few numbers each. More are refused."""
SAVES_AT_ONCE = 2
"""Saves whose ranks copy at the same time. Saves that wait for ``end_save`` don't count."""


_RETRIED = PutRefusal.NO_SPACE, PutRefusal.UNREACHABLE
"""Refusals that may not be repeated when a chunk is offered again."""


@dataclass(frozen=True, slots=True)
class _Grants:
    """What a store, by its number, granted of a save: handles, the runs to write, and the chunk of
    ``ChunksCopied.refused_chunk``, if they are written and if they are not."""

    store: int = 0
    handles: Sequence[WriteHandle] = ()
    runs: tuple[ChunkRun, ...] = ()
    refused_chunk: int | None = None
    unwritten_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class _LookUp:
    """A look-up that can't be answered at once; fields as in ``PoolClient.lookup``."""

    load_id: str
    keys: Sequence[bytes]
    probes: Sequence[Future[list[Residence]]]
    hints: Sequence[PrefixSource]
    timeout_s: float  # of the hinted stores' answers


class PoolClient:
    """The pool client of one instance, owned by its pool connector. ``lookup``, ``start_load``,
    ``cancel_load``, ``save`` and ``end_save`` must be called on one thread; the others are
    thread-safe.

    Args:
        stores: the stores to use; closed with this object.
        geometry: geometry of the model's KV.
        identity: identity of the model's KV.
        transfer_timeout_s: timeout of one load or save in seconds.
        num_ranks: ranks of the instance.
    """

    def __init__(
        self,
        stores: PoolStores,
        geometry: KVGeometry,
        identity: KVIdentity,
        transfer_timeout_s: float,
        num_ranks: int,
    ) -> None:
        self.stats = PoolStats()
        self.load_costs = LoadCosts()
        self._stores = stores
        self._chunk_tokens = identity.chunk_tokens
        self.namespace = identity.root()
        """Namespace of the saved KV, see ``ChunkContent``; may change."""
        self.chunk_bytes = chunk_bytes(geometry, identity.chunk_tokens)
        self._layer_bytes = self.chunk_bytes // geometry.layers
        self._timeout_s = transfer_timeout_s
        self._num_ranks = num_ranks
        self._rank_processes: list[ProcessName] = []
        self._ranks_ready = threading.Event()
        self._ranks = RankOrders(num_ranks, identity.chunk_tokens)
        self._verdicts: dict[str, asyncio.Future[bool]] = {}
        self._active: set[str] = set()  # loads that the loop has started
        # The cancelled ones of them, and whether each was cancelled because it took too long.
        self._cancelled: dict[str, bool] = {}
        self._hinted = HintedStores(
            stores.all,
            stores.connect,
            stores.hint_rule,
            self._count_hint,
            self._on_hinted_disconnect,
        )
        self._loading: set[str] = set()  # the core's thread adds, the loop's removes
        self._saving: set[str] = set()  # the same
        self._save_slots = asyncio.Semaphore(SAVES_AT_ONCE)

    def start(
        self,
        send: SendToRank,
        post: PostPoolEvent,
        fail: Callable[[ConnectorDead], None],
        has_stalled: HasStalled = never_stalls,
    ) -> None:
        """Wait for the ranks, and start the client's thread.

        Args:
            send: sends a message to a rank's worker.
            post: receives events, on any thread.
            fail: receives a failure that must end the engine.
            has_stalled: see ``RankOrders.open``.

        Raises:
            KVConfigError: a rank did not become ready in time.
        """
        if not self._ranks_ready.wait(START_TIMEOUT_S):
            raise KVConfigError(
                f"{len(self._rank_processes)} of {self._num_ranks} ranks opened their transports "
                f"for the pool within {START_TIMEOUT_S:g} s"
            )
        self._stores.name_writers(self._rank_processes)
        self._ranks.open(send, has_stalled)
        self._post = post
        self._loop = IoLoop("kv-pool", self._log_error, fail)
        self._loop.call("", lambda: self._loop.spawn_housekeeping(self._hinted.disconnect_idle()))

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """Process a message of a rank's worker. Thread-safe; may be called before ``start``."""
        decoded = decode_from_rank(message)
        if isinstance(decoded, PoolRankReady):
            self._rank_processes.append(decoded.process)
            if len(self._rank_processes) == self._num_ranks:
                self._ranks_ready.set()
        elif isinstance(decoded, RunsEnded):
            self._loop.call(decoded.order_id, self._ranks.take_report, rank, decoded)
        elif isinstance(decoded, LayersLoaded):
            self._loop.call(decoded.load_id, self._ranks.take_release, decoded)

    def stop(self) -> None:
        """Stop the client's thread and send no more orders. Call it before the ranks are closed.
        Idempotent."""
        if self._ranks.is_open:
            self._ranks.close()
            self._loop.close()

    def close(self) -> None:
        """Close the stores. Call it after the ranks are closed, which read and write them.
        Idempotent."""
        self.stop()
        self._hinted.close()
        self._stores.close()

    # -- for the core ---------------------------------------------------------------------------

    def lookup(
        self,
        load_id: str,
        keys: Sequence[bytes],
        hints: Sequence[PrefixSource] = (),
        timeout_s: float = 0.0,
    ) -> Sequence[ChunkSource] | None:
        """Find out where the leading chunks of a prompt can be loaded from.

        Args:
            load_id: id of the look-up.
            keys: keys of all chunks of the prompt.
            hints: additional stores to probe.
            timeout_s: timeout in seconds of these stores' answers.

        Returns:
            The sources, if they are known at once. None: a ``ChunksFound`` event follows.
        """
        self.stats.num_lookups += 1
        self.stats.num_queried_chunks += len(keys)
        probes = [store.probe(keys) for store in self._stores.all]
        if not hints and all(probe.done() for probe in probes):
            return self._found({n: probe.result() for n, probe in enumerate(probes)})
        look_up = _LookUp(load_id, keys, probes, hints, timeout_s)
        self._loop.call(load_id, self._loop.spawn, self._look_up(look_up), load_id)
        return None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of chunks that were served from the device's prefix cache."""
        if keys:
            self._stores.home.touch(keys)

    def start_load(self, load: LoadRequest) -> None:
        """Start a load; a ``PoolLoadEnded`` event follows in any case."""
        self.stats.num_loads += 1
        self._loading.add(load.load_id)
        self._count_in_flight()
        self._loop.call(load.load_id, self._begin_load, load)

    def cancel_load(self, load_id: str, *, is_late: bool = False) -> None:
        """Cancel a load that has failed because it took too long (``is_late``), or that its request
        needs no more. ``PoolLoadEnded`` follows once it is drained. Idempotent."""
        self._loop.call(load_id, self._cancel, load_id, is_late)

    def save(self, save: SaveRequest) -> bool:
        """Start a save; a ``ChunksCopied`` event follows.

        Returns:
            False, and no event follows, if too many saves are in flight or no store can be
            reached. The refusal is counted.
        """
        is_busy = len(self._saving) >= MAX_SAVES
        if is_busy or store_to_save_to(self._stores.all) is None:
            num_new = len(save.keys) - save.first_chunk - save.num_refused
            self._count_refusals("busy" if is_busy else "unreachable", num_new)
            return False
        self._saving.add(save.save_id)
        self._count_in_flight()
        self._loop.call(save.save_id, self._loop.spawn, self._save(save), save.save_id)
        return True

    def end_save(self, save_id: str, *, is_unchanged: bool) -> None:
        """Answer ``ChunksCopied``: whether the copied blocks hold the KV of the chunks' tokens."""
        self._loop.call(save_id, self._take_verdict, save_id, is_unchanged)

    # -- loop thread ----------------------------------------------------------------------------

    def _begin_load(self, load: LoadRequest) -> None:
        self._active.add(load.load_id)
        self._loop.spawn(self._load(load), load.load_id)

    def _log_error(self, order_id: str, exc: Exception) -> None:
        """Log an unexpected exception of the loop. All that it ends post their events anyway."""
        logger.warning("the pool client failed in %s: %r", order_id, exc)

    async def _look_up(self, look_up: _LookUp) -> None:
        found: Sequence[ChunkSource] = ()
        try:
            hinted = await self._hinted.probe(look_up.hints, look_up.keys, look_up.timeout_s)
            places = {n: await asyncio.wrap_future(probe) for n, probe in enumerate(look_up.probes)}
            found = self._found(places | dict(hinted))
        finally:
            self._post(ChunksFound(look_up.load_id, found))

    def _found(self, places: Mapping[int, Sequence[Residence]]) -> list[ChunkSource]:
        found = nearest_sources(places)
        counts = self.stats.num_found_chunks
        for source in found:
            counts[source.name] = counts.get(source.name, 0) + 1
        return found

    async def _load(self, load: LoadRequest) -> None:
        began = time.monotonic()
        num_valid, error = load.first_chunk, "the pool client failed"
        is_drained = True
        pinned: PinnedChunks | None = None
        try:
            lease_s = load.timeout_s + LEASE_MARGIN_S
            pinned = await pin_chunks(load, self._store, lease_s, self._layer_bytes)
            runs = self._runs(load, pinned)
            num_chunks = load.first_chunk + sum(len(run.offsets) for run in runs)
            if not runs:
                error = "the stores no longer have its chunks"
                return
            following = asyncio.ensure_future(self._follow(load.load_id, pinned))
            try:
                failure = await self._read(load, runs, began, are_arriving=pinned.are_arriving)
                if following.done() and not following.result():
                    failure = "an SSD did not deliver its chunks"
            finally:
                following.cancel()
            are_valid = await pinned.release()
            pinned = None
            if failure is None and are_valid:
                num_valid = num_chunks
            error = failure or ("" if are_valid else "its read handles expired")
        except ConnectorDead:  # a rank may still write to the blocks: they must not be freed
            is_drained = False
            raise
        finally:
            if pinned is not None:
                await pinned.release()
            self._active.discard(load.load_id)
            is_unneeded = not self._cancelled.pop(load.load_id, True)
            self._loading.discard(load.load_id)
            self._count_in_flight()
            self.stats.num_failed_loads += num_valid < len(load.keys) and not is_unneeded
            self.stats.num_loaded_chunks += num_valid - load.first_chunk
            if is_drained:
                self._post(PoolLoadEnded(load.load_id, num_valid, error or None))

    def _runs(self, load: LoadRequest, pinned: PinnedChunks) -> list[ChunkRun]:
        """The runs of the leading chunks that are pinned in reachable stores."""
        chunks = []
        for position in range(load.first_chunk, len(load.keys)):
            if position not in pinned.handles:
                break
            number, handle = pinned.handles[position]
            epoch = self._introduce(number)
            if epoch is None:
                break
            chunks.append(PlacedChunk(epoch, position, handle.offset))
        return consecutive_runs(chunks, load.skipped_tokens)

    async def _follow(self, load_id: str, pinned: PinnedChunks) -> bool:
        """Send the ranks ``LayersArrived`` as stores read layers from SSDs. If some will not
        arrive, cancels the ranks' order and returns False."""
        num_sent = 0

        def arrived(num_bytes: int) -> None:
            nonlocal num_sent
            num_layers = num_bytes // self._layer_bytes
            if num_layers > num_sent:
                num_sent = num_layers
                self._ranks.broadcast(LayersArrived(load_id, num_layers))

        have_arrived = await pinned.watch_arrivals(self.chunk_bytes, arrived)
        if not have_arrived:
            self._ranks.broadcast(CancelRuns(load_id))
        return have_arrived

    async def _read(
        self, load: LoadRequest, runs: Sequence[ChunkRun], began: float, *, are_arriving: bool
    ) -> str | None:
        """Have all ranks read; returns the error, or None on success."""
        num_chunks = load.first_chunk + sum(len(run.offsets) for run in runs)
        if load.load_id in self._cancelled:
            self._learn(load, num_chunks, began, ())
            return "the load was cancelled"
        exposed: list[float] = []

        def released() -> None:
            exposed.append(time.monotonic() - began)
            self._post(LoadReleased(load.load_id, num_chunks))

        order = LoadRuns(
            load.load_id,
            load.request_id,
            tuple(runs),
            tuple(load.block_ids),
            load.timeout_s,
            load.release_layers,
            are_arriving,
            len(load.keys) * self._chunk_tokens,
        )
        reports = await self._ranks.run(
            load.load_id, order, None if load.release_layers is None else released
        )
        failure = next((r.error for r in reports if r.error is not None), None)
        self._learn(load, num_chunks, began, reports)
        if failure is None:
            now, stats = time.monotonic(), self.stats
            stats.loaded_bytes += sum(report.nbytes for report in reports)
            add_by_transport(stats.loaded_bytes_by_transport, reports)
            stats.load_seconds += now - began
            stats.exposed_seconds += exposed[0] if exposed else now - began
            stats.stalled_seconds += max(report.stalled_s for report in reports)
            stats.hideable_seconds += min(load.compute_s, now - began)
        return failure

    def _learn(
        self, load: LoadRequest, num_chunks: int, began: float, reports: Sequence[RunsEnded]
    ) -> None:
        """Update the cost model of a source with the duration of a load that had a single source.

        A load that timed out counts too, with a lower bound of its duration, unless it was queued
        for most of its time: then other loads, maybe of other sources, had all threads. Other
        failures tell nothing about the cost.
        """
        sources = set(load.sources[load.first_chunk : num_chunks])
        now = time.monotonic()
        has_succeeded = bool(reports) and all(report.error is None for report in reports)
        moving_s = max((report.seconds for report in reports), default=load.timeout_s)
        is_late = now - began >= load.timeout_s and moving_s >= load.timeout_s / 2
        if len(sources) != 1 or not (has_succeeded or is_late):
            return
        num_tokens = (num_chunks - load.first_chunk) * self._chunk_tokens - load.skipped_tokens
        nbytes = self.chunk_bytes * num_tokens // self._chunk_tokens  # not multiplied by the ranks
        if has_succeeded:
            self.load_costs.learn(sources.pop(), nbytes, now - began, now)
        else:
            least_s = now - began + max((report.missing_s for report in reports), default=0.0)
            self.load_costs.learn_late(sources.pop(), nbytes, least_s, began, now)

    async def _save(self, save: SaveRequest) -> None:
        grants = _Grants(unwritten_chunk=save.first_chunk)
        was_copied = is_unchanged = is_copying = False
        reports: Sequence[RunsEnded] = ()
        try:
            async with self._save_slots:
                grants = await self._reserve(save)
                is_copying = bool(grants.runs)
                reports = await self._write(save, grants.runs) if grants.runs else ()
                is_copying = False
            failure = next((each.error for each in reports if each.error is not None), None)
            if failure is not None:
                logger.info("%s was not saved: %s", save.save_id, failure)
                self._count_refusals("failed", len(grants.handles))
            elif grants.runs:
                was_copied = True
                is_unchanged = await self._ask_core(save.save_id, grants.refused_chunk)
                self.stats.num_layerwise_saves += is_unchanged and save.step is not None
                self._count_refusals("reused", 0 if is_unchanged else len(grants.handles))
        except KVTransferError as exc:
            logger.warning("%s was not saved: %s", save.save_id, exc)
            self._count_refusals("failed", len(grants.handles))
        finally:
            if not was_copied:
                self._post(ChunksCopied(save.save_id, False, grants.unwritten_chunk))
            try:
                # Ranks that have not reported may still write. The store gets their memory back
                # when they have, or when the instance disconnects from it, after its ranks are
                # closed.
                if grants.handles and not is_copying:
                    if is_unchanged:
                        await self._commit(grants, is_copy=save.copy is not None)
                    else:
                        await self._abort(grants, reports)
            finally:
                self._saving.discard(save.save_id)
                self._count_in_flight()
        if is_copying:
            await self._abort(grants, await self._ranks.await_late(save.save_id))

    async def _write(self, save: SaveRequest, runs: tuple[ChunkRun, ...]) -> list[RunsEnded]:
        """Have all ranks write; returns their reports."""
        blocks = tuple(save.block_ids)
        order = SaveRuns(save.save_id, runs, blocks, self._timeout_s, save.step)
        reports = await self._ranks.run(save.save_id, order)
        if all(report.error is None for report in reports):
            add_by_transport(self.stats.saved_bytes_by_transport, reports)
        return reports

    def _count_in_flight(self) -> None:
        self.stats.loads_in_flight = len(self._loading)
        self.stats.saves_in_flight = len(self._saving)

    async def _commit(self, grants: _Grants, *, is_copy: bool) -> None:
        stored = await asyncio.wrap_future(self._stores.all[grants.store].commit(grants.handles))
        num_stored = stored.count(True)
        self.stats.num_saves += num_stored > 0
        self.stats.num_saved_chunks += num_stored
        self.stats.num_copied_chunks += num_stored if is_copy else 0
        self.stats.saved_bytes += num_stored * self.chunk_bytes
        self._count_refusals("late", len(grants.handles) - num_stored)

    async def _abort(self, grants: _Grants, reports: Sequence[RunsEnded]) -> None:
        store = self._stores.all[grants.store]
        may_arrive = any(report.may_still_arrive for report in reports)
        await asyncio.wrap_future(store.abort(grants.handles, may_still_arrive=may_arrive))

    async def _reserve(self, save: SaveRequest) -> _Grants:
        """Reserve memory for the chunks to save. Chunks that another store has are left out, unless
        the save is a copy; those that are refused are counted, once for lack of memory."""
        keys, positions = save.keys, range(save.first_chunk, len(save.keys))
        number = store_to_save_to(self._stores.all) or 0
        if number and save.copy is not None:  # it would have been one for the home store
            self._count_refusals("unreachable", len(positions))
            return _Grants()
        wanted = [keys[each] for each in positions]
        elsewhere = await held_elsewhere(self._stores.all, wanted, number)
        copy, missing = save.copy, list(positions)
        if copy is None:
            missing = [p for p in positions if keys[p] not in elsewhere]
            self._count_refusals("elsewhere", len(positions) - len(missing))
        else:
            num_copies = max(1, *(elsewhere.get(keys[p], 0) for p in positions))
            copy = replace(copy, num_copies=num_copies)
        if not missing:
            return _Grants()
        size = self._chunk_tokens, self.chunk_bytes
        chunks = [save.chunk(position, *size, self.namespace) for position in missing]
        lease_s = self._timeout_s + LEASE_MARGIN_S
        arena = (store := self._stores.all[number]).arena
        grants = await asyncio.wrap_future(
            store.reserve(chunks, lease_s=lease_s, copy=copy, is_use=save.is_use)
        )
        epoch = self._introduce(number)
        if arena is None or epoch != arena.epoch:
            epoch = None  # the store has restarted: the handles' epoch is unknown, so write nothing
        handles, placed, retried = {}, [], []
        num_counted = save.first_chunk + save.num_refused
        for position, grant in zip(missing, grants, strict=True):
            if isinstance(grant, WriteHandle):
                handles[position] = grant
                if epoch is not None:
                    placed.append(PlacedChunk(epoch, position, grant.offset))
                continue
            if grant in _RETRIED:
                retried.append(position)
            if grant not in _RETRIED or position >= num_counted:
                self._count_refusals(grant.value, 1)
        runs = tuple(consecutive_runs(placed))
        first_retried, first = (min(p, default=None) for p in (retried, [*handles, *retried]))
        return _Grants(number, [*handles.values()], runs, first_retried, first)

    async def _ask_core(self, save_id: str, refused_chunk: int | None) -> bool:
        """Post ``ChunksCopied`` and wait for the core's answer; False if there is none in time."""
        verdict = self._verdicts[save_id] = asyncio.get_running_loop().create_future()
        self._post(ChunksCopied(save_id, refused_chunk=refused_chunk))
        try:
            done, _ = await asyncio.wait({verdict}, timeout=VERDICT_TIMEOUT_S)
            return bool(done) and verdict.result()
        finally:
            del self._verdicts[save_id]

    def _take_verdict(self, save_id: str, is_unchanged: bool) -> None:
        verdict = self._verdicts.get(save_id)
        if verdict is not None and not verdict.done():
            verdict.set_result(is_unchanged)

    def _cancel(self, load_id: str, is_late: bool) -> None:
        if load_id in self._active:
            self._cancelled.setdefault(load_id, is_late)
        self._ranks.cancel(load_id)

    def _introduce(self, number: int) -> str | None:
        """Introduce a store to the ranks; returns its epoch, or None if it can't be reached."""
        store = self._store(number)
        arena = None if store is None else store.arena
        if arena is None:
            return None
        if number < len(self._stores.all):
            self.stats.begin_transports(arena.endpoints)
        return self._ranks.introduce(number, arena)

    def _store(self, number: int) -> ChunkStore | None:
        """The configured or hinted store of a number; None if a hinted one was disconnected."""
        own = self._stores.all
        return own[number] if number < len(own) else self._hinted.use(number)

    def _on_hinted_disconnect(self, number: int) -> None:
        self._ranks.forget(number)
        for tier in Tier:
            self.load_costs.forget(ChunkSource(number, tier))

    def _count_hint(self, outcome: str) -> None:
        hints = self.stats.num_prefix_hints
        hints[outcome] = hints.get(outcome, 0) + 1

    def _count_refusals(self, reason: str, count: int) -> None:
        if count:
            refusals = self.stats.num_save_refusals
            refusals[reason] = refusals.get(reason, 0) + count
