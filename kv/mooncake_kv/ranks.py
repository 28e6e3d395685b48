"""Messages between a connector's scheduler side and its per-rank workers, and ``RankLoads``, which
runs a load on all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec

from mooncake_hal.specs import TransportConstraints
from mooncake_kv.errors import ConnectorDead, Fatal, HandshakeRefused, KVTransferError
from mooncake_kv.handshake import RankMetadata


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: an instance to read from or write to, with its metadata.

    Args:
        engine_id: the instance's epoch.
        ranks: metadata of its ranks.
        rope_order: the rope order of its latents if it differs from ours; what is read from it is
            converted. Otherwise empty.
    """

    engine_id: str
    ranks: tuple[RankMetadata, ...]
    rope_order: str = ""


class ForgetPeer(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: an epoch is gone; close the connections to it."""

    engine_id: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler, once: the rank is ready, with its metadata.

    Args:
        metadata: the rank's shard, layout and endpoints.
        stops_writes_on_failure: whether a write ends with its writer on every transport that peers
            may use.
        transports: constraints of each open transport, by name.
    """

    metadata: RankMetadata
    stops_writes_on_failure: bool
    transports: dict[str, TransportConstraints]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: read the KV of tokens ``[start, stop)`` of a prompt that ends at
    ``prompt_stop``."""

    request_id: str
    engine_id: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    start: int
    stop: int
    spread: int
    prompt_stop: int


class CancelLoad(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: cancel a load, drain it, and report as usual."""

    request_id: str


class ConvertRopeOrder(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: tokens ``[start, stop)`` of a prompt were written by a peer that keeps
    the rope rows of latents in ``order``; convert them to ours, and report as for a load."""

    request_id: str
    local_blocks: tuple[int, ...]
    start: int
    stop: int
    order: str


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler: a load has ended and is drained, or rope rows are converted.

    Args:
        request_id: the request that was loaded.
        error: reason of the failure; None if every byte has arrived and is converted.
        nbytes, seconds: bytes moved, and time from the order to the report.
        is_refused: whether it failed because no transport connects the two instances.
    """

    request_id: str
    error: str | None
    nbytes: int
    seconds: float
    is_refused: bool = False


class LocalRanks(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker, once: all ranks of this instance, which divide the writes of a push."""

    ranks: tuple[RankMetadata, ...]


class StartPush(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: the peer has granted a push; write the KV of tokens ``[start, stop)``.

    May arrive before, while or after the request runs.
    """

    request_id: str
    engine_id: str
    remote_blocks: tuple[int, ...]
    start: int
    stop: int
    spread: int


class StopPush(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: stop writing, drain, and report.

    Args:
        request_id: the request that is pushed.
        reason: why it is stopped.
        has_ended: whether its ``EndPush`` was sent already; otherwise it follows.
    """

    request_id: str
    reason: str
    has_ended: bool


class EndPush(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: the request has finished. If it is complete, write the rest; then
    report.

    Args:
        request_id: the request that is pushed.
        is_complete: whether all of its prompt's KV has been computed.
        block_ids: its block table.
        num_tokens: length of the prompt.
    """

    request_id: str
    is_complete: bool
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


class PushReport(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler, once per request: the push is drained; nothing more will be sent.

    Args:
        request_id: the request that was pushed.
        error: reason of the failure; None if every byte of this rank's share was written.
        written: bytes written, by the peer's rank.
        seconds: time spent in transfers.
        may_still_arrive: whether a write failed in flight, whose data may still arrive.
        is_refused: whether it failed because no transport connects the two instances.
    """

    request_id: str
    error: str | None
    written: dict[int, int]
    seconds: float
    may_still_arrive: bool = False
    is_refused: bool = False


ToRank = (
    ConnectPeer
    | ForgetPeer
    | Load
    | CancelLoad
    | ConvertRopeOrder
    | LocalRanks
    | StartPush
    | StopPush
    | EndPush
)
FromRank = RankReady | LoadReport | PushReport

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def spread_of(request_id: str) -> int:
    """A number by which both sides choose, among ranks that hold the same KV, the one that serves
    a request.

    Args:
        request_id: the name given by the instance that reserved the blocks, or holds them.
    """
    return crc32(request_id.encode())


SendToRank = Callable[[int, bytes], None]
"""Sends a message to the worker of a rank."""


REPORT_TIMEOUT_S = 600.0
"""Timeout of a rank's report, in seconds beyond the rank's own deadline of the load. A rank begins
a load after the step in flight, for which engines wait 300 s by default."""
STALL_CHECKS = 20
"""How many times during that timeout the engine is checked for a stall."""


async def await_reports(
    reported: asyncio.Future[Any], limit_s: float, has_stalled: Callable[[], bool]
) -> bool:
    """Wait for all ranks' reports. The timeout counts the time that was spent waiting rather than
    a clock's, because a process that was suspended could not receive reports.

    Args:
        reported: resolves to the reports.
        limit_s: timeout in seconds; time in which the engine is stalled does not count.
        has_stalled: returns whether the engine has stopped stepping.

    Returns:
        False if at least one rank has not reported in time.
    """
    num_checks = 0
    while num_checks < STALL_CHECKS:
        await asyncio.wait([reported], timeout=limit_s / STALL_CHECKS)
        if reported.done():
            return True
        num_checks += not has_stalled()
    return False


class RankGroup:
    """All ranks of this instance.

    Args:
        num_ranks: number of ranks.
        send: sends a message to a rank's worker.
    """

    def __init__(self, num_ranks: int, send: SendToRank) -> None:
        self.num_ranks = num_ranks
        self._send = send

    def broadcast(self, message: ToRank) -> None:
        """Send a message to every rank."""
        encoded = encode(message)
        for rank in range(self.num_ranks):
            self._send(rank, encoded)


@dataclass(slots=True)
class _PendingLoad:
    done: asyncio.Future[list[LoadReport]]
    reports: dict[int, LoadReport] = field(default_factory=dict)


class RankLoads:
    """Sends each load, or rope conversion, to every rank and waits until every rank has reported.
    Loop thread only.

    A rank enforces a deadline of its own, and reports when it has passed. If a rank sends no report
    at all, it is unknown whether it still writes, so the instance ends.

    Args:
        ranks: the ranks of this instance.
        limit_s: timeout of a report, in seconds; time in which the engine is stalled does not
            count.
        has_stalled: returns whether the engine has stopped stepping.
    """

    def __init__(
        self,
        ranks: RankGroup,
        limit_s: float = REPORT_TIMEOUT_S,
        has_stalled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._has_stalled = has_stalled
        self._pending: dict[str, _PendingLoad] = {}

    async def run(self, load: Load | ConvertRopeOrder) -> list[LoadReport]:
        """Run a load on every rank; returns the reports once all ranks have drained.

        Raises:
            KVTransferError: at least one rank failed; the first reason is the message.
            HandshakeRefused: as before, and no transport connects the two instances.
            ConnectorDead: at least one rank has not reported in time, or may not have received the
                message.
        """
        pending = _PendingLoad(asyncio.get_running_loop().create_future())
        self._pending[load.request_id] = pending
        try:
            self._send_to_all(load)
            reports = await self._reported(load.request_id, pending)
        finally:
            del self._pending[load.request_id]
        for rank, report in enumerate(reports):
            if report.error is not None:
                where = f"rank {rank}: " if self._ranks.num_ranks > 1 else ""
                kind = HandshakeRefused if report.is_refused else KVTransferError
                raise kind(where + report.error)
        return reports

    def _send_to_all(self, load: Load | ConvertRopeOrder) -> None:
        try:
            self._ranks.broadcast(load)
        except Exception as exc:  # some ranks may have begun it, and it can't end on all of them
            raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, exc) from exc

    async def _reported(self, request_id: str, pending: _PendingLoad) -> list[LoadReport]:
        """Wait for all ranks' reports."""
        if await await_reports(pending.done, self._limit_s, self._has_stalled):
            return pending.done.result()
        silent = [rank for rank in range(self._ranks.num_ranks) if rank not in pending.reports]
        reason = (
            f"ranks {silent} sent no report of the load of {request_id} within {self._limit_s:g} s"
        )
        raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, KVTransferError(reason))

    def cancel(self, request_id: str) -> None:
        """Ask all ranks to cancel a load; they report as usual."""
        if request_id in self._pending:
            self._ranks.broadcast(CancelLoad(request_id))

    def report(self, rank: int, report: LoadReport) -> None:
        """Process the report of a rank that has drained its part."""
        pending = self._pending.get(report.request_id)
        if pending is None:
            return
        pending.reports[rank] = report
        num_ranks = self._ranks.num_ranks
        if len(pending.reports) == num_ranks and not pending.done.done():
            pending.done.set_result([pending.reports[rank] for rank in range(num_ranks)])
