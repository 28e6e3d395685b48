"""The pool's orders to the ranks of an instance: sends each one to all ranks and collects their
reports. Used by ``PoolClient`` on its loop thread.

Ranks know stores by epoch. ``introduce`` describes a store to them before the first order that
names its epoch, and ``forget`` has them disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_kv.connector import HasStalled, never_stalls
from mooncake_kv.errors import ConnectorDead, Fatal, KVTransferError
from mooncake_kv.pool.pool_messages import (
    CancelRuns,
    ConnectStore,
    ForgetStore,
    LayersLoaded,
    LoadRuns,
    RunsEnded,
    SaveRuns,
    ToRank,
    encode,
)
from mooncake_kv.ranks import REPORT_TIMEOUT_S, SendToRank, await_reports
from mooncake_kv.store.chunk_store import ArenaInfo


@dataclass(slots=True, eq=False)
class _Order:
    """An order that ranks are executing.

    Args:
        ended: resolves to the reports of all ranks.
        reports: the reports so far, by rank.
        num_released: ranks that have sent ``LayersLoaded``.
        on_release: called once all ranks have.
    """

    ended: asyncio.Future[list[RunsEnded]]
    reports: dict[int, RunsEnded] = field(default_factory=dict)
    num_released: int = 0
    on_release: Callable[[], None] | None = None


class RankOrders:
    """The orders in flight, and the stores that the ranks know. Not thread-safe, except for
    ``open`` and ``close``.

    Args:
        num_ranks: ranks of the instance.
        chunk_tokens: tokens per chunk.
    """

    def __init__(self, num_ranks: int, chunk_tokens: int) -> None:
        self._num_ranks = num_ranks
        self._chunk_tokens = chunk_tokens
        self._orders: dict[str, _Order] = {}
        self._known_epochs: dict[int, str] = {}  # by number of the store
        self._send: SendToRank | None = None
        self._has_stalled: HasStalled = never_stalls

    @property
    def is_open(self) -> bool:
        """Whether messages are sent to the ranks."""
        return self._send is not None

    def open(self, send: SendToRank, has_stalled: HasStalled = never_stalls) -> None:
        """Start to send messages.

        Args:
            send: sends a message to a rank's worker.
            has_stalled: returns whether the engine has stopped stepping.
        """
        self._send, self._has_stalled = send, has_stalled

    def close(self) -> None:
        """Send no more messages. Idempotent."""
        self._send = None

    async def run(
        self,
        order_id: str,
        message: LoadRuns | SaveRuns,
        on_release: Callable[[], None] | None = None,
    ) -> list[RunsEnded]:
        """Have all ranks execute an order. Each rank enforces the order's timeout itself, and
        reports when it has passed.

        Args:
            order_id: id of the load or save.
            message: the order.
            on_release: called once all ranks have released the load, see ``LayersLoaded``.

        Returns:
            The ranks' reports, once no rank has a transfer of the order in flight.

        Raises:
            KVTransferError: at least one rank has not reported a save ``REPORT_TIMEOUT_S`` after
                that timeout, and may still write to the store; ``await_late`` must follow. Time in
                which the engine is stalled does not count.
            ConnectorDead: the same of a load: the rank may still write to KV blocks.
        """
        order = _Order(asyncio.get_running_loop().create_future(), on_release=on_release)
        self._orders[order_id] = order
        is_awaited = False
        try:
            self.broadcast(message)
            limit_s = message.timeout_s + REPORT_TIMEOUT_S
            if await await_reports(order.ended, limit_s, self._has_stalled):
                return order.ended.result()
            is_awaited = isinstance(message, SaveRuns)
        finally:
            if not is_awaited:
                del self._orders[order_id]
        silent = [rank for rank in range(self._num_ranks) if rank not in order.reports]
        error = KVTransferError(f"ranks {silent} sent no report of {order_id} within {limit_s:g} s")
        if isinstance(message, LoadRuns):
            raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, error)
        raise error

    async def await_late(self, order_id: str) -> list[RunsEnded]:
        """Wait for the reports of all ranks on a save that ``run`` has given up, however late."""
        try:
            return await self._orders[order_id].ended
        finally:
            del self._orders[order_id]

    def cancel(self, order_id: str) -> None:
        """Have the ranks cancel an order. Its reports follow as usual. Ignores unknown orders."""
        if order_id in self._orders:
            self.broadcast(CancelRuns(order_id))

    def take_report(self, rank: int, report: RunsEnded) -> None:
        """Process the report of a rank."""
        order = self._orders.get(report.order_id)
        if order is None:
            return
        order.reports[rank] = report
        if len(order.reports) == self._num_ranks and not order.ended.done():
            order.ended.set_result(list(order.reports.values()))

    def take_release(self, message: LayersLoaded) -> None:
        """Process the release of a load by one rank."""
        order = self._orders.get(message.load_id)
        if order is None:
            return
        order.num_released += 1
        if order.num_released == self._num_ranks and order.on_release is not None:
            order.on_release()

    def introduce(self, number: int, arena: ArenaInfo) -> str:
        """Describe a store to the ranks unless they know it.

        Args:
            number: the store's number.
            arena: its arena, which a restarted store has anew.

        Returns:
            The store's epoch, which orders may name from now on.
        """
        if self._known_epochs.get(number) != arena.epoch:
            self.forget(number)
            self._known_epochs[number] = arena.epoch
            self.broadcast(
                ConnectStore(
                    arena.epoch,
                    arena.address,
                    arena.nbytes,
                    dict(arena.endpoints),
                    self._chunk_tokens,
                )
            )
        return arena.epoch

    def forget(self, number: int) -> None:
        """Have the ranks disconnect from the store of this number, unless the same store has
        another number, too."""
        known = self._known_epochs.pop(number, None)
        if known is not None and known not in self._known_epochs.values():
            self.broadcast(ForgetStore(known))

    def broadcast(self, message: ToRank) -> None:
        """Send a message to all ranks; drops it if closed."""
        if self._send is None:
            return
        encoded = encode(message)
        for rank in range(self._num_ranks):
            self._send(rank, encoded)
