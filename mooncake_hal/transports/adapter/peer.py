"""A connection to one other endpoint: transfers wait in a queue, a thread moves them in slices."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import (
    PeerLost,
    RegionRevoked,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mooncake_hal.transport import Spans, Transfer
from mooncake_hal.transports.adapter.agent import Engine, Slice
from mooncake_hal.transports.adapter.link import Link
from mooncake_hal.transports.adapter.work import Work
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.regions import check_spans
from mooncake_hal.transports.transfers import DONE, FinishedTransfer, RunningTransfer

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Attempts at one slice, while the peer answers and still has the region."""

NEWS_SECONDS = 0.05
"""How long the news of a revocation may take behind the failure that it causes."""

PATIENCE_SECONDS = 0.25
"""How long the peer is waited for until it is looked whether anybody still wants the transfer."""


class AdapterPeer:
    """See ``Peer``.

    Args:
        engine: says how transfers are cut.
        session: the control connection; closed with the peer.
        link: moves the slices; closed with the peer.
        local: our own regions.
    """

    def __init__(
        self, engine: Engine, session: Session, link: Link, local: AttachedRegions
    ) -> None:
        self._engine = engine
        self._session = session
        self._link = link
        self._local = local
        self._waiting: deque[Work] = deque()
        self._moving: Work | None = None
        self._changed = threading.Condition(threading.RLock())
        self._error: TransferError | None = None
        self.closed = False
        self._thread = threading.Thread(target=self._run, name=f"{engine.name}-peer", daemon=True)
        self._thread.start()

    # -- the contract -----------------------------------------------------------------------------

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        """See ``Peer``."""
        return self._start(True, spans, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        """See ``Peer``."""
        return self._start(False, spans, timeout)

    def close(self) -> None:
        """See ``Peer``."""
        with self._changed:
            self.closed = True
            self.lost(PeerLost("the connection was closed on this side"))
        self._thread.join()
        self._link.close()
        self._session.close()

    # -- called by the endpoint -------------------------------------------------------------------

    def lost(self, error: TransferError) -> None:
        """Let everything fail; nothing works any more. Idempotent."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def withdraw(self, key: int) -> None:
        """End every transfer that touches our region ``key``; drained when this returns."""
        with self._changed:
            works = [*self._waiting, *([self._moving] if self._moving else [])]
        for work in works:
            if key in work.local_keys:
                work.transfer.abort(RegionRevoked("its local region was revoked under it"))
        self._link.forget(key)

    # -- starting and stopping --------------------------------------------------------------------

    def _start(self, is_read: bool, spans: Spans, timeout: float) -> Transfer:
        if self._error is not None:
            return FinishedTransfer(self._error)
        check_spans(spans)
        if not len(spans):
            return DONE
        keys = frozenset(np.unique(_keys(self._local, spans.local, spans.nbytes)).tolist())
        work = Work(is_read, self._engine.cut(spans), keys)
        deadline = time.monotonic() + timeout
        work.transfer = RunningTransfer(1, deadline, lambda: self._stop(work))
        with self._changed:
            if self._error is not None:
                return FinishedTransfer(self._error)
            self._waiting.append(work)
            self._changed.notify_all()
        return work.transfer

    def _stop(self, work: Work) -> None:
        """Move no more of it; one that waits ends at once, else when its slice is through."""
        with self._changed:
            work.error = work.error or TransferCancelled("cancelled by this side")
            if work not in self._waiting:
                return
            self._waiting.remove(work)
        work.transfer.part_ended(work.error)

    def _why_stop(self, work: Work) -> TransferError | None:
        """Return why a transfer is not to go on, if so."""
        if work.error is None and time.monotonic() >= work.transfer.deadline:
            work.error = work.transfer.late()
        return work.error or self._error

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._advance(work)
        except Exception as exc:  # thread top: whoever waits must hear of it
            logger.exception("%s: the thread that moves slices failed", self._engine.name)
            self.lost(TransferError(f"{self._engine.name}: moving slices failed: {exc!r}"))
            self._end_all()

    def _next(self) -> Work | None:
        """Wait for something to move; None when the peer is closed and everything has ended."""
        with self._changed:
            while not self._waiting and not self.closed:
                self._changed.wait()
            self._moving = self._waiting.popleft() if self._waiting else None
            return self._moving

    def _advance(self, work: Work) -> None:
        """Move one slice; the transfers of a peer take turns."""
        error = None
        try:
            self._move_next(work)
        except TransferError as exc:
            error = exc
        with self._changed:
            self._moving = None
            error = error or (None if work.is_moved else self._why_stop(work))
            if error is None and not work.is_moved:
                self._waiting.append(work)
                return
        work.transfer.part_ended(error)

    def _move_next(self, work: Work) -> None:
        """Move a transfer's next slice, or find out why that did not work.

        Raises:
            TransferError: it is not worth another attempt.
        """
        self._require_wanted(work)
        spans = work.slices[work.num_moved]
        part = self._located(work, spans)
        try:
            self._link.move(part, lambda: self._why_stop(work) is not None)
        except TransferError as exc:
            # A peer's engine lets go of a region before the peer says so.
            time.sleep(NEWS_SECONDS)
            self._await_peer(work)
            self._located(work, spans)
            work.num_failures += 1
            logger.warning("%s: a slice failed: %s", self._engine.name, exc)
            if work.num_failures == MAX_FAILURES:
                raise TransferError(
                    f"{self._engine.name}: the engine failed {MAX_FAILURES} times in a row, "
                    f"though the peer answers: {exc}"
                ) from exc
        else:
            work.num_moved += 1
            work.num_failures = 0

    def _located(self, work: Work, spans: Spans) -> Slice:
        """Look up which regions a slice lies in; what is missing, after all news is in."""
        local = _keys(self._local, spans.local, spans.nbytes)
        try:
            remote = _keys(self._session.regions, spans.remote, spans.nbytes)
        except TransferError:
            self._await_peer(work)
            remote = _keys(self._session.regions, spans.remote, spans.nbytes)
        return Slice(work.is_read, spans, local, remote)

    def _await_peer(self, work: Work) -> None:
        """Wait until the peer has answered, and so has told all its news.

        Raises:
            TransferError: it is lost, or nobody wants the transfer any more.
        """
        while True:
            self._require_wanted(work)
            try:
                self._session.barrier(PATIENCE_SECONDS)
            except TransferTimeout:
                continue
            return

    def _require_wanted(self, work: Work) -> None:
        error = self._why_stop(work)
        if error is not None:
            raise error

    def _end_all(self) -> None:
        with self._changed:
            works = [*self._waiting, *([self._moving] if self._moving else [])]
            self._waiting.clear()
            self._moving = None
        for work in works:
            work.transfer.part_ended(self._error)


def _keys(
    regions: AttachedRegions,
    addresses: NDArray[np.uint64],  # [n]
    nbytes: NDArray[np.uint64],  # [n]
) -> NDArray[np.int64]:
    """Return which region each span lies in: [n].

    Raises:
        RegionUnknown, RegionRevoked, OutOfBounds: for the first span that lies in none.
    """
    index, at = regions.locate(addresses, nbytes)
    return np.array(index.keys, np.int64)[at]
