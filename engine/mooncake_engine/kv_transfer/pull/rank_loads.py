"""Loads on all ranks of this instance, seen as one. Loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_engine.errors import KVTransferError
from mooncake_engine.kv_transfer.pull.rank_messages import (
    CancelLoad,
    Load,
    LoadReport,
    ToRank,
    encode,
)

SendToRank = Callable[[int, bytes], None]


@dataclass(slots=True)
class _Pending:
    done: asyncio.Future[list[LoadReport]]
    reports: dict[int, LoadReport] = field(default_factory=dict)


class RankLoads:
    """Sends each load to every rank and waits until every rank has reported.

    Args:
        num_ranks: how many ranks there are.
        send: carries a message to a rank's worker side.
    """

    def __init__(self, num_ranks: int, send: SendToRank) -> None:
        self._num_ranks = num_ranks
        self._send = send
        self._pending: dict[str, _Pending] = {}

    def tell_all(self, message: ToRank) -> None:
        """Send a message to every rank."""
        encoded = encode(message)
        for rank in range(self._num_ranks):
            self._send(rank, encoded)

    async def run(self, load: Load) -> list[LoadReport]:
        """Load on every rank; returns the reports when all ranks have drained.

        Raises:
            KVTransferError: at least one rank failed; the first reason is the message.
        """
        pending = _Pending(asyncio.get_running_loop().create_future())
        self._pending[load.request_id] = pending
        try:
            self.tell_all(load)
            reports = await pending.done
        finally:
            del self._pending[load.request_id]
        for rank, report in enumerate(reports):
            if report.error is not None:
                where = f"rank {rank}: " if self._num_ranks > 1 else ""
                raise KVTransferError(where + report.error)
        return reports

    def cancel(self, request_id: str) -> None:
        """Ask all ranks to end a load; they report as usual."""
        if request_id in self._pending:
            self.tell_all(CancelLoad(request_id))

    def report(self, rank: int, report: LoadReport) -> None:
        """A rank has drained its part."""
        pending = self._pending.get(report.request_id)
        if pending is None:
            return
        pending.reports[rank] = report
        if len(pending.reports) == self._num_ranks and not pending.done.done():
            pending.done.set_result([pending.reports[rank] for rank in range(self._num_ranks)])
