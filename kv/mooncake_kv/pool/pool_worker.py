"""A rank's half of the pool: moves chunks between its KV memory and the stores' arenas.

``PoolClient``, beside the scheduler, sends the orders (``pool_messages``). Loads and saves have
separate threads and connections, so that neither blocks the other. A step blocks only on the layers
of loads that its own requests depend on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mooncake_hal.errors import HalError, TransferCancelled, TransferError
from mooncake_hal.kv.geometry import KVShard
from mooncake_hal.kv.transfer_plan import KVShardSpec
from mooncake_hal.session.processes import this_process
from mooncake_hal.transport import Transfer
from mooncake_kv.connector_worker import LayerDone, RankContext, single_thread
from mooncake_kv.errors import ConnectorDead
from mooncake_kv.order_transfers import OrderTransfers
from mooncake_kv.peer_connections import LOADING, SAVING, PeerConnections
from mooncake_kv.pool.device_staging import connect_memory
from mooncake_kv.pool.pool_messages import (
    CancelRuns,
    ChunkRun,
    ConnectStore,
    ForgetStore,
    LayersArrived,
    LayersLoaded,
    LoadRuns,
    PoolRankReady,
    RunsEnded,
    SaveRuns,
    decode_to_rank,
    encode,
)
from mooncake_kv.pool.step_progress import StepProgress
from mooncake_kv.store.chunk_layout import (
    ChunkTransfer,
    LayerPlans,
    stored_layout,
    writes_for_its_replicas,
)

logger = logging.getLogger(__name__)

LOAD_THREADS = 4
"""Threads for loads from memory. As many more serve the loads that wait for SSDs."""
SAVE_THREADS = 2
"""Threads for saves: as many as the saves that a pool client copies at once."""
MAX_MOVES = 2 * LOAD_THREADS + SAVE_THREADS
"""Transfers that all threads together wait for, one each."""
GROUP_BYTES = 2 << 20
"""Approximate size of a group of layers, the unit of loading: large enough that moving it takes
longer than requesting it."""
Layers = tuple[int, int]
"""A half-open range of the model's layers."""
STORE_RANK = 0
"""A store is one process, which has a single rank."""
ALL_LAYERS = 1 << 30
"""A layer count above any model's: all layers are in the stores' memory."""


@dataclass(frozen=True, slots=True)
class _Store:
    """A store that this rank can connect to."""

    layout: KVShardSpec
    endpoints: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class _RunPlan:
    """The transfer plan of one run of chunks.

    Args:
        epoch: epoch of the store to read from or write to.
        connection: number of the connection to use.
        layers: plans the spans of any group of layers.
    """

    epoch: str
    connection: int
    layers: LayerPlans


class PoolWorker:
    """Executes the pool's orders on one rank. ``begin_step`` must be called on the step's thread;
    all other methods are thread-safe.

    Args:
        context: the rank's memory, and its channel to the pool client.

    Raises:
        KVConfigError: the configured transports can't be used here.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        memory = context.memory
        self._local = KVShardSpec(memory.shard, memory.layout)
        self._transports = connect_memory(context, MAX_MOVES)
        self._stops_writes = self._transports.stops_writes_on_failure
        self._connections = PeerConnections(self._transports.forget)
        self._stores: dict[str, _Store] = {}
        self._loads: dict[str, _RunningLoad] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        bind = context.bind_pool_thread
        self._loading = ThreadPoolExecutor(
            LOAD_THREADS, f"pool-load-{context.rank}", initializer=bind
        )
        self._arriving = ThreadPoolExecutor(
            LOAD_THREADS, f"pool-arrive-{context.rank}", initializer=bind
        )
        self._saving = ThreadPoolExecutor(
            SAVE_THREADS, f"pool-save-{context.rank}", initializer=bind
        )
        self._progress = StepProgress(context.make_event)
        self._ending = single_thread(f"pool-end-{context.rank}")
        context.emit(encode(PoolRankReady(this_process())))

    def receive(self, message: bytes) -> None:
        """Process a message of the pool client; transfers run on the worker's threads."""
        order = decode_to_rank(message)
        with self._lock:
            if self._is_closed:
                return
            if isinstance(order, LoadRuns):
                self._begin_load(order)
            elif isinstance(order, LayersArrived):
                if (load := self._loads.get(order.load_id)) is not None:
                    load.in_store(order.num_layers)
            elif isinstance(order, SaveRuns):
                transfers = OrderTransfers(time.monotonic() + order.timeout_s)
                self._submit(
                    self._saving, order.save_id, transfers, partial(self._write, order, transfers)
                )
            elif isinstance(order, CancelRuns):
                if (load := self._loads.get(order.load_id)) is not None:
                    self._cancel(load)
            elif isinstance(order, ConnectStore):
                self._stores[order.epoch] = self._describe(order)
            elif isinstance(order, ForgetStore):
                self._stores.pop(order.epoch, None)
                self._connections.forget(order.epoch)
                self._ending.submit(self._transports.forget, order.epoch)

    @property
    def has_loads(self) -> bool:
        """Whether any load is queued or in flight."""
        return bool(self._loads)

    def begin_step(
        self, number: int, request_ids: Collection[str], *, completes_chunks: bool
    ) -> LayerDone | None:
        """Prepare for a step that is about to run.

        Args:
            number: number of the step.
            request_ids: ids of its requests.
            completes_chunks: whether the step completes chunks that are saved layer by layer.

        Returns:
            The step's layer hook. It must be called on the step's thread when the writes of a
            layer's KV are enqueued, before the layer reads KV. It blocks until that layer of the
            requests' loads has arrived, or the load has failed, was cancelled or timed out. None if
            no save and no load needs the hook.
        """
        with self._lock:
            theirs = [load for load in self._loads.values() if load.order.request_id in request_ids]
            loads = [load for load in theirs if load.begin_step()]
        layer_done = self._progress.begin(number) if completes_chunks else None
        if not loads:
            return layer_done

        def wait_for(layer: int) -> None:
            if layer_done is not None:
                layer_done(layer)
            for load in loads:
                load.wait_for(layer)

        return wait_for

    def close(self) -> None:
        """Stop all threads and deregister the memory. Idempotent."""
        with self._lock:
            self._is_closed = True
            loads = list(self._loads.values())
        self._progress.close()
        for load in loads:
            load.cancel()
        for threads in (self._loading, self._arriving, self._saving, self._ending):
            threads.shutdown(wait=True, cancel_futures=True)
        self._transports.close()

    def _describe(self, order: ConnectStore) -> _Store:
        geometry = self._context.memory.geometry
        layout = stored_layout(geometry, order.chunk_tokens, order.address, order.nbytes)
        return _Store(layout, order.endpoints)

    # -- loading --------------------------------------------------------------------------------

    def _begin_load(self, order: LoadRuns) -> None:
        load = _RunningLoad(order, self._context.memory.shard.layer_start)
        self._loads[order.load_id] = load
        threads = self._arriving if order.are_arriving else self._loading
        self._submit(threads, order.load_id, load, partial(self._read, load))

    def _cancel(self, load: _RunningLoad) -> None:
        """Cancel a load: steps stop waiting for it. A load that is still queued ends here; running
        transfers are cancelled and drained on another thread."""
        load.stop_waits()
        cancelled = TransferCancelled("the load was cancelled")
        self._report(load.order.load_id, partial(_fail, cancelled), load)
        self._ending.submit(load.cancel)

    def _read(self, load: _RunningLoad) -> None:
        """Read the load's layers group by group. The next group is started while one is in flight,
        except during the first one, so that the first layer, for which the request's first step
        waits, gets the full bandwidth."""
        order, moving = load.order, deque[tuple[int, list[Transfer]]]()
        release_after = self._own_layers(order.release_layers or 0)
        with self._connected(order.runs, LOADING, load) as connections:
            self._mark_started(load)
            plans = self._plans(order.runs, order.block_ids, connections, order.window_stop)
            groups = list(self._groups(order.runs))
            if order.are_arriving:  # plan the first group while an SSD still reads it
                for plan in plans:
                    plan.layers.spans(groups[0])
            for group in groups:
                for start, stop in load.arriving(group):
                    if start == stop:  # no more layers in the store yet: finish those in flight
                        while moving:
                            self._finish(load, *moving.popleft(), release_after)
                        continue
                    transfers = self._start(plans, (start, stop), load, is_read=True)
                    load.num_begun = stop - self._local.shard.layer_start
                    moving.append((stop, transfers))
                    if len(moving) > 1 or load.num_loaded == 0:
                        self._finish(load, *moving.popleft(), release_after)
            while moving:
                self._finish(load, *moving.popleft(), release_after)

    def _mark_started(self, load: _RunningLoad) -> None:
        """A thread has started the load, so that steps may wait for its layers.

        Raises:
            TransferError: the load timed out or was cancelled while it was queued.
        """
        load.time_left()
        if load.order.release_layers == 0:
            self._context.emit(encode(LayersLoaded(load.order.load_id)))

    def _finish(
        self, load: _RunningLoad, stop: int, transfers: list[Transfer], release_after: int
    ) -> None:
        load.wait(transfers)
        first = self._local.shard.layer_start
        was, now = load.num_loaded, stop - first
        load.arrived(stop)
        if release_after and was < release_after <= now:
            self._context.emit(encode(LayersLoaded(load.order.load_id)))

    def _own_layers(self, release_layers: int) -> int:
        """This rank's share of the layers that must arrive before the request is released."""
        shard, num_layers = self._local.shard, self._context.memory.geometry.layers
        return -(-release_layers * shard.layers // num_layers)

    def _groups(self, runs: Sequence[ChunkRun]) -> Iterator[tuple[int, int]]:
        """Split this rank's layers into groups: the first layer alone, then by GROUP_BYTES."""
        shard, geometry = self._local.shard, self._context.memory.geometry
        num_tokens = sum(len(run.offsets) for run in runs) * self._chunk_tokens(runs)
        layer_bytes = max(num_tokens * geometry.token_bytes // geometry.layers, 1)
        size = max(GROUP_BYTES // layer_bytes, 1)
        start = shard.layer_start
        stop = start + 1
        while start < shard.layer_stop:
            yield start, stop
            start, stop = stop, min(stop + size, shard.layer_stop)

    def _chunk_tokens(self, runs: Sequence[ChunkRun]) -> int:
        return self._store(runs[0].epoch).layout.layout.block_size

    # -- saving ---------------------------------------------------------------------------------

    def _write(self, order: SaveRuns, transfers: OrderTransfers) -> None:
        """Write the save's layers group by group, each once its step has computed it."""
        shard, runs = self._local.shard, order.runs
        mine = runs if shard.replicas == 1 else list(_own_share(runs, shard))
        with self._connected(runs, SAVING, transfers) as connections:
            plans = self._plans(mine, order.block_ids, connections)
            for layers in self._groups(runs):
                if order.step is not None:
                    self._progress.await_layer(order.step, layers[1] - 1, transfers.time_left())
                transfers.wait(self._start(plans, layers, transfers, is_read=False))

    # -- both -----------------------------------------------------------------------------------

    @contextmanager
    def _connected(
        self, runs: Sequence[ChunkRun], use: str, transfers: OrderTransfers
    ) -> Iterator[dict[str, int]]:
        """The connections for an order's transfers, see ``PeerConnections.used``. If the block
        fails, its transfers are drained."""
        with self._connections.used({run.epoch for run in runs}, use) as connections:
            try:
                yield connections
            except BaseException:
                transfers.drain()
                raise

    def _plans(
        self,
        runs: Sequence[ChunkRun],
        block_ids: Sequence[int],
        connections: Mapping[str, int],
        window_stop: int | None = None,
    ) -> list[_RunPlan]:
        """Plan the transfers of each run; for ``window_stop`` see ``ChunkTransfer``."""
        geometry = self._context.memory.geometry
        return [
            _RunPlan(
                run.epoch,
                connections[run.epoch],
                LayerPlans(
                    geometry,
                    self._local,
                    self._store(run.epoch).layout,
                    ChunkTransfer(
                        run.first_chunk,
                        run.offsets,
                        block_ids,
                        skipped_tokens=run.skipped_tokens,
                        window_stop=window_stop,
                    ),
                ),
            )
            for run in runs
        ]

    def _start(
        self,
        plans: Sequence[_RunPlan],
        layers: Layers,
        transfers: OrderTransfers,
        *,
        is_read: bool,
    ) -> list[Transfer]:
        """Start the transfers of a group of layers."""
        started = []
        for plan in plans:
            store = self._store(plan.epoch)
            spans = plan.layers.spans(layers)
            if not len(spans):
                continue
            timeout_s = transfers.time_left()
            peer = self._transports.peer(
                plan.epoch,
                STORE_RANK,
                store.endpoints,
                connection=plan.connection,
                timeout_s=timeout_s,
            )
            move = peer.read if is_read else peer.write
            transfer = move(spans, timeout=transfers.time_left())
            transport = self._transports.transport_of(plan.epoch, STORE_RANK, plan.connection)
            transfers.add(transfer, spans.total_bytes, transport)
            started.append(transfer)
        return started

    def _store(self, epoch: str) -> _Store:
        store = self._stores.get(epoch)
        if store is None:
            raise TransferError(f"the store of epoch {epoch} is not connected any more")
        return store

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        order_id: str,
        transfers: OrderTransfers,
        work: Callable[[], None],
    ) -> None:
        """Queue an order's work. If no thread can be started, the order is reported as failed."""
        try:
            threads.submit(self._report, order_id, work, transfers)
        except RuntimeError as exc:
            no_thread = TransferError(f"a thread can't be started: {exc}")
            self._report(order_id, partial(_fail, no_thread), transfers)

    def _report(self, order_id: str, work: Callable[[], None], transfers: OrderTransfers) -> None:
        """Run an order's work and report it, once, after its transfers are drained. The top
        function of pool threads."""
        if not transfers.claim():
            return
        started, error = time.monotonic(), None
        try:
            work()
        except HalError as exc:
            error = f"{type(exc).__name__}: {exc}"
        except ConnectorDead as exc:  # not reported, so that its memory stays reserved
            self._context.fail(exc)
            return
        except Exception as exc:
            logger.exception("moving the chunks of %s failed", order_id)
            error = f"moving its chunks failed: {exc!r}"
        finally:
            if isinstance(transfers, _RunningLoad):
                transfers.end()
        stalled_s = begun_share = 0.0
        if isinstance(transfers, _RunningLoad):
            stalled_s = transfers.stalled_s
            begun_share = transfers.num_begun / self._local.shard.layers
            if transfers.is_missed and error is None:
                error = "a step continued without a layer that had not arrived in time"
            with self._lock:
                self._loads.pop(order_id, None)
        seconds = time.monotonic() - started
        ended = RunsEnded(
            order_id,
            error,
            transfers.nbytes,
            seconds,
            stalled_s,
            begun_share,
            transfers.by_transport,
            error is not None and transfers.has_begun and not self._stops_writes,
        )
        self._context.emit(encode(ended))


def _fail(error: TransferError) -> None:
    raise error


def _own_share(runs: Sequence[ChunkRun], shard: KVShard) -> Iterator[ChunkRun]:
    """The chunks that this rank writes on behalf of all replicas of its shard."""
    for run in runs:
        for position, offset in enumerate(run.offsets, run.first_chunk):
            if writes_for_its_replicas(shard, position):
                yield ChunkRun(run.epoch, position, (offset,))


class _RunningLoad(OrderTransfers):
    """The state of one load: which layers have arrived, and which steps wait for them.

    Args:
        order: the load order.
        first_layer: this rank's first layer.
    """

    def __init__(self, order: LoadRuns, first_layer: int) -> None:
        super().__init__(time.monotonic() + order.timeout_s)
        self.order = order
        self.stalled_s = 0.0
        self.num_begun = self.num_loaded = 0  # layers
        self.is_missed = False
        """Whether a step ran the request without all layers; final once the load has ended."""
        self._first_layer = first_layer
        self._num_in_store = 0 if order.are_arriving else ALL_LAYERS
        self._has_ended = False
        self._awaited: dict[int, float] = {}  # number of layers that steps wait for: since when
        self._changed = threading.Condition()

    def in_store(self, num_layers: int) -> None:
        """The first ``num_layers`` of all of its chunks are in the stores' memory."""
        with self._changed:
            self._num_in_store = max(self._num_in_store, num_layers)
            self._changed.notify_all()

    def arriving(self, layers: Layers) -> Iterator[Layers]:
        """Yield the parts of a group of layers, each once it is in the stores' memory. Yields an
        empty range before it blocks.

        Raises:
            TransferCancelled: the load was cancelled, or an SSD did not deliver in time.
        """
        start, stop = layers
        while start < stop:
            if self._num_in_store <= start:
                yield start, start
                self._await_store(start)
            there = min(self._num_in_store, stop)
            yield start, there
            start = there

    def _await_store(self, layer: int) -> None:
        left_s = max(self.deadline - time.monotonic(), 0.0)
        with self._changed:
            self._changed.wait_for(lambda: self._num_in_store > layer or self._is_cancelled, left_s)
            if self._is_cancelled:
                raise TransferCancelled("the load was cancelled")
            if self._num_in_store <= layer:
                raise TransferCancelled("an SSD did not deliver its chunks in time")

    def stop_waits(self) -> None:
        """``cancel`` without draining the running transfers: returns at once."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def cancel(self) -> None:
        self.stop_waits()
        super().cancel()

    def arrived(self, stop: int) -> None:
        """All layers before ``stop`` have arrived."""
        with self._changed:
            self.num_loaded = stop - self._first_layer
            self._wake()

    def end(self) -> None:
        """The load has ended, successfully or not: steps stop waiting for it."""
        with self._changed:
            self._has_ended = True
            self._wake()

    def begin_step(self) -> bool:
        """A step is about to run the load's request; returns whether it must wait for the layers.
        It must not if the load is still queued or was cancelled, since its request is then computed
        or starts over."""
        with self._changed:
            waits = self._has_ended or (self._is_claimed and not self._is_cancelled)
            self.is_missed |= not waits
            return waits

    def wait_for(self, layer: int) -> None:
        """Block until a layer has arrived, or the load has ended, was cancelled or timed out. If a
        step continues without the layer, the load counts as failed, even if the layer still
        arrives."""
        wanted = layer + 1 - self._first_layer
        if self._is_there(wanted):
            return
        with self._changed:
            if not self._is_there(wanted):
                began = self._awaited.setdefault(wanted, time.monotonic())
                left_s = max(self.deadline - time.monotonic(), 0.0)
                self._changed.wait_for(lambda: self._is_there(wanted) or self._is_cancelled, left_s)
            if not self._is_there(wanted):
                self.is_missed = True
                if self._awaited.pop(wanted, None) is not None:
                    self.stalled_s += time.monotonic() - began

    def _is_there(self, wanted: int) -> bool:
        return self.num_loaded >= wanted or self._has_ended

    def _wake(self) -> None:
        """Notify waiting steps. Their stall times are added here, because the load may be reported
        before the steps wake up."""
        now = time.monotonic()
        for wanted in [number for number in self._awaited if self._is_there(number)]:
            self.stalled_s += now - self._awaited.pop(wanted)
        self._changed.notify_all()
