"""The client's side of an adapter: the agent for one peer, and transfers in slices."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import (
    PeerLost,
    RegionRevoked,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.session.regions import AttachedRegions, check_spans
from mooncake_hal.session.session import Session
from mooncake_hal.transport import MemoryRegion, Spans, Transfer
from mooncake_hal.transports.adapters.adapter_messages import AgentDescription
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine, Agent, Slice
from mooncake_hal.transports.transfers import DONE, FinishedTransfer, RunningTransfer


@dataclass(slots=True, eq=False)
class SlicedTransfer:
    """One read or write, and its progress.

    Args:
        is_read: whether it is a read.
        slices: the spans of each slice; at least one.
        local_keys: keys of our regions that it touches.
        transfer: the transfer object that the caller holds.
        error: why no more slices are moved.
        num_moved: number of slices that have been moved.
        num_failures: consecutive failed attempts at the current slice.
    """

    is_read: bool
    slices: list[Spans]
    local_keys: frozenset[int]
    transfer: RunningTransfer = field(init=False)
    error: TransferError | None = None
    num_moved: int = 0
    num_failures: int = 0

    @property
    def is_moved(self) -> bool:
        """Whether all slices have been moved."""
        return self.num_moved == len(self.slices)


TOKEN_KEY = 0
"""Key of the peer's token; keys of regions begin with 1."""

STAGING_KEY = -1
"""Key of the local memory into which the token is read."""


class AgentLink:
    """Our agent for one peer. Every peer has an agent of its own, so that closing it does not
    affect others.

    Args:
        engine: opens the agent.
        description: description of the peer's agent.
        region: returns our region with a key; None if it is revoked.
        session: session to the peer.
    """

    def __init__(
        self,
        engine: AdaptedEngine,
        description: AgentDescription,
        region: Callable[[int], MemoryRegion | None],
        session: Session,
    ) -> None:
        self._engine = engine
        self._description = description
        self._region = region
        self._session = session
        self._agent: Agent | None = None
        self._registered: set[int] = set()
        self._known_remote: set[int] = set()
        self._lock = threading.Lock()

    def prove(self, deadline: float) -> None:
        """Check that the agent reaches the peer's engine, by reading the peer's token.

        Raises:
            TransportUnavailable: the peer's engine is unreachable, or another engine replied.
        """
        token = self._description.token
        staging = self._engine.workspace(len(token))
        ours, theirs = staging.address, self._description.token_address
        spans = Spans(*(np.array([value], np.uint64) for value in (ours, theirs, len(token))))
        part = Slice(True, spans, np.array([STAGING_KEY]), np.array([TOKEN_KEY]))
        name = self._engine.name
        with self._lock:
            agent = self._opened()
            agent.register(STAGING_KEY, self._engine.workspace_region(staging, len(token)))
            try:
                agent.learn(TOKEN_KEY, self._description.token_attachment)
                agent.move(part, lambda: time.monotonic() >= deadline)
            except TransferError as exc:
                raise TransportUnavailable(
                    name, f"the peer's engine is unreachable: {exc}"
                ) from exc
            agent.deregister(STAGING_KEY)
        if staging.get() != token:
            raise TransportUnavailable(name, "another engine replies at the peer's address")

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """Move a slice. If this raises, the agent has been closed, so that no more bytes move."""
        with self._lock:
            try:
                agent = self._opened()
                self._prepare(agent, part)
                agent.move(part, must_stop)
            except BaseException:
                self._discard()
                raise

    def forget(self, key: int) -> None:
        """Deregister our region from the agent, after the slice that is being moved."""
        with self._lock:
            if self._agent is not None and key in self._registered:
                self._registered.discard(key)
                self._agent.deregister(key)

    def close(self) -> None:
        """Close the agent. Idempotent."""
        with self._lock:
            self._discard()

    def _opened(self) -> Agent:
        if self._agent is None:
            self._agent = self._engine.open_agent(self._session)
            self._agent.meet(self._description.agent)
        return self._agent

    def _prepare(self, agent: Agent, part: Slice) -> None:
        """Register the slice's regions with the agent, as far as it does not know them yet."""
        for key in np.unique(part.local_keys).tolist():
            if key not in self._registered:
                region = self._region(key)
                if region is None:
                    raise RegionRevoked(f"region {key} of this side has been revoked")
                agent.register(key, region)
                self._registered.add(key)
        fresh = [
            key for key in np.unique(part.remote_keys).tolist() if key not in self._known_remote
        ]
        attachments = self._session.regions.attachments(fresh)
        for key, attachment in zip(fresh, attachments, strict=True):
            if not attachment:
                raise RegionRevoked(f"region {key} of the peer has been revoked")
            agent.learn(key, attachment)
            self._known_remote.add(key)

    def _discard(self) -> None:
        agent, self._agent = self._agent, None
        self._registered.clear()
        self._known_remote.clear()
        if agent is not None:
            agent.close()


logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Attempts at one slice, as long as the peer replies and still has the region."""

NOTIFICATION_DELAY_SECONDS = 0.05
"""How much later the notification of a revocation may arrive than the failure that the revocation
causes."""

WANTED_CHECK_SECONDS = 0.25
"""While waiting for the peer, how often to check whether the transfer is still wanted."""


class AdapterPeer:
    """Moves transfers slice by slice, on a thread and with an agent of its own.

    Args:
        engine: divides transfers into slices.
        session: session to the other end; closed with the peer.
        link: moves the slices; closed with the peer.
        local: this endpoint's regions.

    Raises:
        TransferError: no thread could be started; the caller still owns session and link.
    """

    def __init__(
        self, engine: AdaptedEngine, session: Session, link: AgentLink, local: AttachedRegions
    ) -> None:
        self._engine = engine
        self._session = session
        self._link = link
        self._local = local
        self._queue: deque[SlicedTransfer] = deque()
        self._moving: SlicedTransfer | None = None
        self._changed = threading.Condition(threading.RLock())
        self._error: TransferError | None = None
        self.closed = False
        self._thread = threading.Thread(target=self._run, name=f"{engine.name}-slices", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise TransferError(f"a peer's thread can't be started: {exc}") from exc

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(True, spans, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(False, spans, timeout)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self.lost(PeerLost("the connection was closed on this side"))
        self._thread.join()
        self._link.close()
        self._session.close()

    def lost(self, error: TransferError) -> None:
        """Fail all present and future transfers. Idempotent."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def withdraw(self, key: int) -> None:
        """Fail every transfer that touches our region ``key``; they are drained when this
        returns."""
        with self._changed:
            transfers = [*self._queue, *([self._moving] if self._moving else [])]
        for work in transfers:
            if key in work.local_keys:
                work.transfer.abort(RegionRevoked("the local region was revoked in mid-transfer"))
        self._link.forget(key)

    def _start(self, is_read: bool, spans: Spans, timeout: float) -> Transfer:
        if self._error is not None:
            return FinishedTransfer(self._error)
        check_spans(spans)
        if not len(spans):
            return DONE
        keys = frozenset(np.unique(_keys(self._local, spans.local, spans.nbytes)).tolist())
        work = SlicedTransfer(is_read, self._engine.cut(spans), keys)
        deadline = time.monotonic() + timeout
        work.transfer = RunningTransfer(1, deadline, lambda: self._stop(work))
        with self._changed:
            if self._error is not None:
                return FinishedTransfer(self._error)
            self._queue.append(work)
            self._changed.notify_all()
        return work.transfer

    def _stop(self, work: SlicedTransfer) -> None:
        """Stop a transfer: immediately if it is queued, otherwise after its current slice."""
        with self._changed:
            work.error = work.error or TransferCancelled("cancelled by this side")
            if work not in self._queue:
                return
            self._queue.remove(work)
        work.transfer.part_ended(work.error)

    def _stop_reason(self, work: SlicedTransfer) -> TransferError | None:
        """Return why a transfer must not continue, or None if it may."""
        if work.error is None and time.monotonic() >= work.transfer.deadline:
            work.error = work.transfer.late()
        return work.error or self._error

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._advance(work)
        except Exception as exc:  # thread top: all transfers must fail with it
            logger.exception("%s: the thread that moves slices failed", self._engine.name)
            self.lost(TransferError(f"{self._engine.name}: moving slices failed: {exc!r}"))
            self._end_all()

    def _next(self) -> SlicedTransfer | None:
        """Wait for the next queued transfer; None once the peer is closed and none is left."""
        with self._changed:
            while not self._queue and not self.closed:
                self._changed.wait()
            self._moving = self._queue.popleft() if self._queue else None
            return self._moving

    def _advance(self, work: SlicedTransfer) -> None:
        """Move one slice of a transfer, then requeue it: a peer's transfers take turns."""
        error = None
        try:
            self._move_next(work)
        except TransferError as exc:
            error = exc
        with self._changed:
            self._moving = None
            error = error or (None if work.is_moved else self._stop_reason(work))
            if error is None and not work.is_moved:
                self._queue.append(work)
                return
        work.transfer.part_ended(error)

    def _move_next(self, work: SlicedTransfer) -> None:
        """Move a transfer's next slice; counts a failure that may be retried.

        Raises:
            TransferError: the transfer must not be retried.
        """
        self._require_wanted(work)
        spans = work.slices[work.num_moved]
        part = self._located(work, spans)
        try:
            self._link.move(part, lambda: self._stop_reason(work) is not None)
        except TransferError as exc:
            # The peer's engine deregisters a region before the peer notifies us.
            time.sleep(NOTIFICATION_DELAY_SECONDS)
            self._await_peer(work)
            self._located(work, spans)
            work.num_failures += 1
            logger.warning("%s: a slice failed: %s", self._engine.name, exc)
            if work.num_failures == MAX_FAILURES:
                raise TransferError(
                    f"{self._engine.name}: the engine failed {MAX_FAILURES} times in a row, "
                    f"though the peer replies: {exc}"
                ) from exc
        else:
            work.num_moved += 1
            work.num_failures = 0

    def _located(self, work: SlicedTransfer, spans: Spans) -> Slice:
        """Look up the regions of a slice; if a remote one is unknown, once more after all pending
        notifications were processed."""
        local = _keys(self._local, spans.local, spans.nbytes)
        try:
            remote = _keys(self._session.regions, spans.remote, spans.nbytes)
        except TransferError:
            self._await_peer(work)
            remote = _keys(self._session.regions, spans.remote, spans.nbytes)
        return Slice(work.is_read, spans, local, remote)

    def _await_peer(self, work: SlicedTransfer) -> None:
        """Wait until the peer has replied, so that all its earlier notifications were processed.

        Raises:
            TransferError: the peer is lost, or the transfer is not wanted any more.
        """
        while True:
            self._require_wanted(work)
            try:
                self._session.barrier(WANTED_CHECK_SECONDS)
            except TransferTimeout:
                continue
            return

    def _require_wanted(self, work: SlicedTransfer) -> None:
        error = self._stop_reason(work)
        if error is not None:
            raise error

    def _end_all(self) -> None:
        with self._changed:
            transfers = [*self._queue, *([self._moving] if self._moving else [])]
            self._queue.clear()
            self._moving = None
        for work in transfers:
            work.transfer.part_ended(self._error)


def _keys(
    regions: AttachedRegions,
    addresses: NDArray[np.uint64],  # [n]
    nbytes: NDArray[np.uint64],  # [n]
) -> NDArray[np.int64]:
    """Return the key of each span's region: [n].

    Raises:
        RegionUnknown, RegionRevoked, OutOfBounds: for the first span that has none.
    """
    index, at = regions.locate(addresses, nbytes)
    return np.array(index.keys, np.int64)[at]
