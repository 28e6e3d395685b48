"""Per-rank worker of the pull connector: registers the rank's KV memory and reads peers' KV into
it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from mooncake_hal.errors import HalError, NoTransportFits, PeerLost
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_hal.transport import Transfer
from mooncake_kv.connector_worker import ConnectorWorker, RankContext, single_thread
from mooncake_kv.errors import ConnectorDead
from mooncake_kv.handshake import RankMetadata
from mooncake_kv.order_transfers import OrderTransfers
from mooncake_kv.peer_connections import LOADING, PeerConnections
from mooncake_kv.ranks import (
    CancelLoad,
    ConnectPeer,
    ForgetPeer,
    Load,
    LoadReport,
    decode_to_rank,
    encode,
)

logger = logging.getLogger(__name__)

LOAD_THREADS = 4
"""Concurrent loads from one instance."""


class PullWorker(ConnectorWorker):
    """One rank's half of MooncakeConnector; see ``ConnectorWorker``."""

    def __init__(self, context: RankContext) -> None:
        self._cleanup_name = f"kv-end-{context.rank}"
        self._cleanup_thread = single_thread(self._cleanup_name)  # never behind a load
        super().__init__(context)
        self._shard_spec = KVShardSpec(context.memory.shard, context.memory.layout)
        self._connections = PeerConnections(self._transports.forget)
        self._sources: dict[str, _Source] = {}
        self._retired: list[_Source] = []  # forgotten; their last loads may still be draining
        self._loads: dict[str, _RunningLoad] = {}
        self._cleanups: set[Future[None]] = set()  # pending cancellations and disconnections
        self._announce()

    def _execute(self, message: bytes) -> None:
        order = decode_to_rank(message)
        if isinstance(order, Load):
            self._begin(order)
        elif isinstance(order, CancelLoad):
            running = self._loads.get(order.request_id)
            if running is not None:
                self._clean_up(running.order.engine_id, running.cancel)
        elif isinstance(order, ConnectPeer):
            self._retire(order.engine_id)
            threads, cleanup = self._make_threads(), ThreadPoolExecutor(1, self._cleanup_name)
            self._sources[order.engine_id] = _Source(
                order.engine_id, order.ranks, threads, cleanup, order.rope_order
            )
        elif isinstance(order, ForgetPeer):
            self._forget(order.engine_id)

    def _drain(self) -> None:
        for load in list(self._loads.values()):
            load.cancel()
        for source in (*self._retired, *self._sources.values()):
            source.threads.shutdown(wait=True)
            source.cleanup.shutdown(wait=True)
        self._cleanup_thread.shutdown(wait=True)
        wait(list(self._cleanups))  # including those of instances that were forgotten long ago

    def _begin(self, order: Load) -> None:
        self._loads[order.request_id] = load = _RunningLoad(
            order, time.monotonic() + self._timeout_s
        )
        source = self._sources.get(order.engine_id)
        try:
            (source.threads if source else self._cleanup_thread).submit(self._run, load)
        except RuntimeError as exc:  # the host has no thread left
            if load.claim():
                self._report(load, str(exc))

    def _run(self, load: _RunningLoad) -> None:
        """Top of a pool thread: reports the load exactly once, drained, whatever happens."""
        if not load.claim():
            return
        error, is_refused = None, False
        try:
            self._read(load)
        except HalError as exc:
            error = f"{type(exc).__name__}: {exc}"
            is_refused = isinstance(exc, NoTransportFits)
        except ConnectorDead as exc:  # not reported: its blocks stay reserved
            self.context.fail(exc)
            return
        except Exception as exc:
            logger.exception("loading the KV of %s failed", load.order.request_id)
            error = f"the load failed: {exc!r}"
        self._report(load, error, is_refused=is_refused)

    def _report(self, load: _RunningLoad, error: str | None, *, is_refused: bool = False) -> None:
        request_id = load.order.request_id
        seconds = time.monotonic() - load.deadline + self._timeout_s
        # first: the next part of this request may be ordered immediately
        del self._loads[request_id]
        report = LoadReport(request_id, error, load.nbytes, seconds, is_refused)
        self.context.emit(encode(report))

    def _read(self, load: _RunningLoad) -> None:
        load.time_left()
        engine_id = load.order.engine_id
        with self._connections.used([engine_id], LOADING) as connections:
            try:
                self._move(load, connections[engine_id])
            except BaseException:
                load.drain()
                raise

    def _move(self, load: _RunningLoad, connection: int) -> None:
        order = load.order
        source = self._sources.get(order.engine_id)
        if source is None:
            raise PeerLost(f"instance {order.engine_id} was dropped before the read began")
        ranks = source.ranks
        block_transfer = BlockTransfer(
            order.local_blocks,
            order.remote_blocks,
            (order.start, order.stop),
            spread=order.spread,
            prompt_stop=order.prompt_stop,
        )
        plans = plan_transfer(
            self.context.memory.geometry,
            self._shard_spec,
            [rank.shard_spec for rank in ranks],
            block_transfer,
        )
        transfers: list[Transfer] = []
        for plan in plans:
            peer = self._transports.peer(
                order.engine_id,
                plan.peer,
                ranks[plan.peer].endpoints,
                connection=connection,
                timeout_s=load.time_left(),
            )
            transfers.append(peer.read(plan.spans, timeout=load.time_left()))
            load.add(transfers[-1], plan.spans.total_bytes)
        load.wait(transfers)
        if source.rope_order:
            tokens = order.start, order.stop
            self.convert_rope_order(order.local_blocks, tokens, source.rope_order)

    def _forget(self, engine_id: str) -> None:
        if self._retire(engine_id):
            self._connections.forget(engine_id)
            self._clean_up(engine_id, partial(self._transports.forget, engine_id))

    def _clean_up(self, engine_id: str, end: Callable[[], None]) -> None:
        """Cancel a load, or close the connections to an instance, which may take seconds to drain.
        Runs on that instance's own thread, or on the shared one if the host has no thread left."""
        sources = (*self._retired, *self._sources.values())
        own = next((s.cleanup for s in reversed(sources) if s.engine_id == engine_id), None)
        try:
            pending = (own or self._cleanup_thread).submit(end)
        except RuntimeError:
            pending = self._cleanup_thread.submit(end)
        self._cleanups.add(pending)
        pending.add_done_callback(self._cleanups.discard)

    def _retire(self, engine_id: str) -> bool:
        """Accept no new loads from an instance; returns False if it was not known."""
        source = self._sources.pop(engine_id, None)
        if source is None:
            return False
        source.threads.shutdown(wait=False)
        busy = {load.order.engine_id for load in list(self._loads.values())}
        for retired in self._retired:
            if retired.engine_id not in busy:
                retired.cleanup.shutdown(wait=False)  # queued work still completes
        self._retired = [retired for retired in self._retired if retired.engine_id in busy]
        self._retired.append(source)
        return True

    def _make_threads(self) -> ThreadPoolExecutor:
        name = f"kv-load-{self.context.rank}"
        return ThreadPoolExecutor(LOAD_THREADS, name, initializer=self.context.bind_pool_thread)


@dataclass(frozen=True, slots=True)
class _Source:
    """An instance to read from. It has its own threads, so that a hung instance delays no other:
    ``threads`` read, and the single one of ``cleanup`` cancels reads and closes connections."""

    engine_id: str
    ranks: tuple[RankMetadata, ...]
    threads: ThreadPoolExecutor
    cleanup: ThreadPoolExecutor
    rope_order: str


class _RunningLoad(OrderTransfers):
    """The transfers of one load.

    Args:
        order: the scheduler side's message.
        deadline: see ``OrderTransfers``.
    """

    def __init__(self, order: Load, deadline: float) -> None:
        super().__init__(deadline)
        self.order = order
