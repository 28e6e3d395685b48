"""The client's side of a connection: what the peer registered, and copies to and from it."""

from __future__ import annotations

import ctypes
import errno
import logging
import select
import socket
import threading
import time
from dataclasses import dataclass

import numpy as np

from mooncake_hal.errors import (
    OutOfBounds,
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.regions import RegionTable, check_spans
from mooncake_hal.transports.shm import control, host
from mooncake_hal.transports.shm.copier import Method, make_job
from mooncake_hal.transports.shm.copying import Copy, CopyHooks, Workers
from mooncake_hal.transports.shm.mapping import Mapping, map_shared
from mooncake_hal.transports.transfers import DONE, FinishedTransfer

logger = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
"""Up to how much is copied by the caller: handing it to a thread would take longer."""

_UINT64 = np.dtype(np.uint64)
_POLLRDHUP = 0x2000


@dataclass(frozen=True, slots=True)
class Remote:
    """The process at the other end.

    Args:
        pid: as this process's pid namespace sees it; 0 if it does not.
        started: see ``host.start_time``.
        refusal: None if process_vm_readv reaches it, else why not.
    """

    pid: int
    started: int | None
    refusal: str | None


class ShmPeer:
    """See ``mooncake_hal.transport.Peer``.

    ``_lock`` is held by whoever copies in the caller's thread, begins a copy, or takes a region
    away, so that none sees another half way.
    """

    def __init__(
        self, connection: socket.socket, remote: Remote, local: RegionTable, workers: Workers
    ) -> None:
        self.connection = connection
        self._remote = remote
        self._local = local
        self._workers = workers
        self._regions = RegionTable("the peer")
        self._mappings: dict[int, Mapping] = {}
        self._running: set[Copy] = set()
        self._error: TransferError | None = None
        self._lock = threading.Lock()
        self._answered = threading.Condition()
        self._last_asked = 0
        self._last_answer = 0
        self._hooks = CopyHooks(self._explain, self._death, self._running.discard)

    # -- the contract ---------------------------------------------------------------------------

    def read(self, spans: Spans, *, timeout: float) -> Copy | FinishedTransfer:
        """See ``Peer``."""
        return self._move(spans, timeout, 0)

    def write(self, spans: Spans, *, timeout: float) -> Copy | FinishedTransfer:
        """See ``Peer``."""
        return self._move(spans, timeout, 1)

    def close(self) -> None:
        """See ``Peer``. The service thread closes the descriptor when it sees the end."""
        self.lose(PeerLost("shm: this side closed the connection"))

    # -- what the service thread does -----------------------------------------------------------

    def handle(self) -> None:
        """Read one message of the peer and act on it.

        Raises:
            PeerLost: the connection is over.
        """
        data, fds = control.receive(self.connection)
        try:
            message = control.decode_to_client(data)
            if isinstance(message, control.Offer):
                self.offered(message, fds)
            elif isinstance(message, control.Revoke):
                self._revoked(message.key)
            else:
                self._synced(message.token)
        finally:
            for fd in fds:
                socket.close(fd)

    def offered(self, offer: control.Offer, fds: list[int]) -> None:
        """Take in a region that the peer registered.

        Raises:
            PeerLost: it makes no sense.
        """
        with self._lock:
            if self._error is not None:
                return
            try:
                self._regions.add(offer.key, MemoryRegion(offer.address, offer.nbytes))
            except ValueError as exc:
                raise PeerLost(f"shm: the peer broke the protocol: {exc}") from exc
            if offer.mappable and fds:
                self._map(offer, fds[0])

    def lose(self, error: TransferError) -> None:
        """Fail what is in flight and whatever is tried later; free the mappings. Idempotent."""
        with self._lock:
            self._error = self._error or error
        for copy in list(self._running):
            copy.abort(error)
        with self._answered:
            self._answered.notify_all()
        with self._lock:
            for mapping in self._mappings.values():
                mapping.close()
            self._mappings.clear()
        control.hang_up(self.connection)

    def forget_local(self, key: int) -> None:
        """End the transfers that use a region which this side has just revoked."""
        with self._lock:
            using = [copy for copy in self._running if key in copy.local_keys]
        for copy in using:
            copy.abort(RegionRevoked("this side revoked the local region"))

    def unreachable_region(self) -> str | None:
        """Say which region neither a mapping nor a call reaches, or None."""
        unmapped = [key for key, _ in self._regions.items() if key not in self._mappings]
        if not unmapped or self._remote.refusal is None:
            return None
        return f"region {unmapped[0]} has no mappable descriptor, and {self._remote.refusal}"

    def _map(self, offer: control.Offer, fd: int) -> None:
        try:
            self._mappings[offer.key] = map_shared(fd, offer.fd_offset, offer.nbytes)
        except OSError as exc:
            logger.warning(
                "shm: region %d of the peer can't be mapped (%s): using process_vm_readv",
                offer.key,
                exc.strerror,
            )

    def _revoked(self, key: int) -> None:
        with self._lock:
            try:
                self._regions.revoke(key)
            except TransferError as exc:
                raise PeerLost(f"shm: the peer broke the protocol: {exc}") from exc
            using = [copy for copy in self._running if key in copy.remote_keys]
        for copy in using:
            copy.abort(RegionRevoked("the peer revoked the region in mid-transfer"))
        mapping = self._mappings.pop(key, None)
        if mapping is not None:
            mapping.close()
        control.send(self.connection, control.Revoked(key))

    def _synced(self, token: int) -> None:
        with self._answered:
            self._last_answer = token
            self._answered.notify_all()

    # -- moving ---------------------------------------------------------------------------------

    def _move(self, spans: Spans, timeout: float, write: int) -> Copy | FinishedTransfer:
        nbytes = spans.nbytes
        if (
            nbytes.size == spans.local.size == spans.remote.size == 1
            and nbytes.dtype is spans.local.dtype is spans.remote.dtype is _UINT64
            and 0 < (size := nbytes.item()) <= INLINE_BYTES
        ):
            done = self._move_one(spans.local.item(), spans.remote.item(), size, write)
            if done is not None:
                return done
        check_spans(spans)
        return self._move_many(spans, timeout, write) if len(spans) else DONE

    def _move_one(self, here: int, there: int, size: int, write: int) -> FinishedTransfer | None:
        """Copy a small piece in the caller's thread; None if the peer has to be asked first."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._local.find(here, size)
            index = self._regions.index
            at = index.position(there, size)
            if at < 0:
                return None
            mapping = self._mappings.get(index.keys[at])
            if mapping is not None:
                there += mapping.address - index.starts[at]
                ctypes.memmove(there if write else here, here if write else there, size)
                return DONE
            failed = self._workers.copier.call_one(self._remote.pid, write, here, there, size)
            return DONE if not failed else FinishedTransfer(self._explain(failed))

    def _move_many(self, spans: Spans, timeout: float, write: int) -> Copy:
        if self._workers.error is not None:
            raise TransferError("shm: a copy thread failed") from self._workers.error
        with self._lock:
            if self._error is not None:
                raise self._error
            index, at = self._local.find_all(spans.local, spans.nbytes)
            copy = Copy(timeout, index.touched(at), self._hooks)
            self._running.add(copy)
        try:
            self._begin(copy, spans, write)
        except (RegionUnknown, RegionRevoked, OutOfBounds):
            self._workers.call(lambda: self._begin_late(copy, spans, write))
            return copy
        except TransportUnavailable:
            self._running.discard(copy)  # nobody gets it, so nobody ends it
            raise
        if spans.total_bytes <= INLINE_BYTES:
            copy.run(self._workers.copier)
        else:
            self._workers.share(copy)
        return copy

    def _begin_late(self, copy: Copy, spans: Spans, write: int) -> None:
        """Begin after hearing all that the peer has registered by now."""
        try:
            self._sync(copy.deadline)
            self._begin(copy, spans, write)
        except TransferError as exc:
            copy.fail(exc)
        else:
            self._workers.share(copy)

    def _begin(self, copy: Copy, spans: Spans, write: int) -> None:
        """Find where the remote pieces are.

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: some are nowhere.
            TransportUnavailable: some can't be reached.
        """
        with self._lock:
            index, at = self._regions.find_all(spans.remote, spans.nbytes)
            keys = index.touched(at)
            method = Method.MAPPING if keys <= self._mappings.keys() else Method.CALL
            if method is Method.CALL and self._remote.refusal is not None:
                raise TransportUnavailable(control.NAME, self._remote.refusal)
            if method is Method.MAPPING:
                shifts = [
                    self._mappings[key].address - start if key in keys else 0
                    for key, start in zip(index.keys, index.starts, strict=True)
                ]
                moved = np.array(shifts, np.int64).astype(np.uint64)[at]
                spans = Spans(spans.local, spans.remote + moved, spans.nbytes)
            job = make_job(
                spans,
                pid=self._remote.pid,
                method=method,
                write=bool(write),
                deadline=copy.deadline,
            )
            copy.begin(job, keys)

    def _sync(self, deadline: float) -> None:
        """Ask the peer for an answer, which comes after all that it has said before.

        Raises:
            PeerLost, TransferTimeout: it does not come.
        """
        with self._answered:
            self._last_asked += 1
            token = self._last_asked
        control.send(self.connection, control.Sync(token))
        with self._answered:
            done = self._answered.wait_for(
                lambda: self._last_answer >= token or self._error is not None,
                max(deadline - time.monotonic(), 0),
            )
        if self._error is not None:
            raise self._error
        if not done:
            raise TransferTimeout("shm: the peer did not say in time what it has registered")

    def _death(self) -> TransferError | None:
        """Say whether the peer is gone by now."""
        if self._error is not None:
            return self._error
        poll = select.poll()
        poll.register(self.connection, select.POLLHUP | _POLLRDHUP)
        return PeerLost("shm: the peer closed or died in mid-transfer") if poll.poll(0) else None

    def _explain(self, code: int) -> TransferError:
        gone = self._death()
        if gone is not None:
            return gone
        pid = self._remote.pid
        if code == errno.ESRCH or host.start_time(pid) != self._remote.started:
            return PeerLost(f"shm: process {pid} has ended")
        if code in (errno.EPERM, errno.ENOSYS):
            return TransportUnavailable(control.NAME, host.explain_refused_call(pid))
        if code == errno.EFAULT:
            return RegionUnknown("shm: registered memory is no longer mapped by its process")
        return TransferError(f"shm: copying failed: {errno.errorcode.get(code, code)}")
