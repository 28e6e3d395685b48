"""Messages between a connector's scheduler side and its per-rank workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import msgspec

from mooncake_hal.specs import TransportConstraints
from mooncake_kv.errors import ConnectorDead, Fatal, KVTransferError
from mooncake_kv.handshake import RankMetadata


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: an instance to read from or write to, as it described itself.

    Args:
        engine_id: which.
        ranks: its own.
        rope_order: of its latents, if it is not ours: what is read is brought into ours.
    """

    engine_id: str
    ranks: tuple[RankMetadata, ...]
    rope_order: str = ""


class ForgetPeer(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: that epoch is gone; drop its connections."""

    engine_id: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler, once: what I hold, where, and how to reach me.

    Args:
        metadata: all that.
        ends_writes: whether a write ends with its writer by every transport that peers may use.
        transports: what each of them asks of both ends, by name.
    """

    metadata: RankMetadata
    ends_writes: bool
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
    """Scheduler to worker: end that load, drain it, and report as usual."""

    request_id: str


class TurnRope(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: tokens ``[start, stop)`` of a prompt were written by a peer that keeps
    the rope rows of latents in this order; bring them into ours, and report as for a load."""

    request_id: str
    local_blocks: tuple[int, ...]
    start: int
    stop: int
    order: str


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler: a load is over and drained, or its rope rows are turned.

    Args:
        request_id: which.
        error: None if every byte has arrived, or is in place.
        nbytes, seconds: what was moved, and how long it took from command to report.
    """

    request_id: str
    error: str | None
    nbytes: int
    seconds: float


class LocalRanks(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker, once: all ranks of this instance, who share the writing."""

    ranks: tuple[RankMetadata, ...]


class StartPush(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: the peer has granted it; write the KV of tokens ``[start, stop)``.

    May come before, while or after the request runs.
    """

    request_id: str
    engine_id: str
    remote_blocks: tuple[int, ...]
    start: int
    stop: int
    spread: int


class StopPush(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: write no more, drain, and report.

    Args:
        request_id: whose.
        reason: why.
        has_ended: whether its ``EndPush`` was sent; it follows otherwise.
    """

    request_id: str
    reason: str
    has_ended: bool


class EndPush(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: the request runs no more. Write what is left, if it is complete, and
    report.

    Args:
        request_id: whose.
        is_complete: whether all of its prompt's KV has been computed.
        block_ids: its block table.
        num_tokens: length of the prompt.
    """

    request_id: str
    is_complete: bool
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


class PushReport(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler, once per request: it is drained; nothing more will be sent.

    Args:
        request_id: whose.
        error: None if every byte of this rank's share was written.
        written: bytes by the peer's rank.
        seconds: spent in transfers.
        may_land: a write failed under way; what it had sent may arrive yet.
    """

    request_id: str
    error: str | None
    written: dict[int, int]
    seconds: float
    may_land: bool = False


ToRank = (
    ConnectPeer
    | ForgetPeer
    | Load
    | CancelLoad
    | TurnRope
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
    """Which of several ranks that hold the same KV serves a request: the same number on both sides.

    Args:
        request_id: of the instance that reserved the blocks, or holds them.
    """
    return crc32(request_id.encode())


SendToRank = Callable[[int, bytes], None]
"""Carries a message to the worker of that rank."""


SILENCE_S = 600.0
"""How long, beyond a rank's own deadline of a load, its report is waited for. A rank begins a load
behind the step that is under way, for which engines wait 300 s if nobody says otherwise."""
LOOKS = 20
"""In that time, whether the engine steps."""


class RankGroup:
    """All ranks of this instance.

    Args:
        num_ranks: how many there are.
        send: carries a message to a rank's worker.
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
    """Sends each load, or what is to be done with it, to every rank and waits until every rank has
    reported. Loop thread only.

    A rank has a deadline of its own, and reports when it is over. From one that obeys no more
    nothing comes, and nobody can know whether it writes: its instance ends.

    Args:
        ranks: of this instance.
        limit_s: how long a report may take; time in which the engine does not step is not counted.
        has_stalled: whether it does not.
    """

    def __init__(
        self,
        ranks: RankGroup,
        limit_s: float = SILENCE_S,
        has_stalled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks = ranks
        self._pause_s = limit_s / LOOKS
        self._has_stalled = has_stalled
        self._pending: dict[str, _PendingLoad] = {}

    async def run(self, load: Load | TurnRope) -> list[LoadReport]:
        """Have every rank do it; returns the reports when all ranks have drained.

        Raises:
            KVTransferError: at least one rank failed; the first reason is the message.
            ConnectorDead: at least one has not reported in time, or may not have been told.
        """
        pending = _PendingLoad(asyncio.get_running_loop().create_future())
        self._pending[load.request_id] = pending
        try:
            self._tell(load)
            reports = await self._reported(load.request_id, pending)
        finally:
            del self._pending[load.request_id]
        for rank, report in enumerate(reports):
            if report.error is not None:
                where = f"rank {rank}: " if self._ranks.num_ranks > 1 else ""
                raise KVTransferError(where + report.error)
        return reports

    def _tell(self, load: Load | TurnRope) -> None:
        try:
            self._ranks.broadcast(load)
        except Exception as exc:  # some have begun it, and it never ends on all of them
            raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, exc) from exc

    async def _reported(self, request_id: str, pending: _PendingLoad) -> list[LoadReport]:
        """All ranks' reports. The time that passes is what was slept, not what a clock says: who
        was stopped for a while has heard nobody."""
        num_looks = 0
        while num_looks < LOOKS:
            await asyncio.wait([pending.done], timeout=self._pause_s)
            if pending.done.done():
                return pending.done.result()
            num_looks += not self._has_stalled()
        silent = [rank for rank in range(self._ranks.num_ranks) if rank not in pending.reports]
        limit_s = LOOKS * self._pause_s
        reason = f"no report of the load of {request_id} by ranks {silent} within {limit_s:g} s"
        raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, KVTransferError(reason))

    def cancel(self, request_id: str) -> None:
        """Ask all ranks to end a load; they report as usual."""
        if request_id in self._pending:
            self._ranks.broadcast(CancelLoad(request_id))

    def report(self, rank: int, report: LoadReport) -> None:
        """A rank has drained its part."""
        pending = self._pending.get(report.request_id)
        if pending is None:
            return
        pending.reports[rank] = report
        num_ranks = self._ranks.num_ranks
        if len(pending.reports) == num_ranks and not pending.done.done():
            pending.done.set_result([pending.reports[rank] for rank in range(num_ranks)])
