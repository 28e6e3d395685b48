"""The client's side of the shm transport: copies to and from one peer, and mappings of its
regions."""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from mooncake_hal.errors import (
    OutOfBounds,
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferError,
    TransportUnavailable,
)
from mooncake_hal.session.authentication import decode
from mooncake_hal.session.processes import start_time
from mooncake_hal.session.regions import AttachedRegions, check_spans
from mooncake_hal.session.session import Session
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.shm.process_memory import (
    SharedMapping,
    explain_refused_call,
    map_shared,
)
from mooncake_hal.transports.shm.shm_copying import (
    CopyHooks,
    CopyMethod,
    CopyThreads,
    CopyTransfer,
    make_job,
)
from mooncake_hal.transports.transfers import DONE, FinishedTransfer

logger = logging.getLogger(__name__)

NAME = "shm"

INLINE_BYTES = 256 * 1024
"""Transfers of up to this many bytes are copied by the caller: passing them to a thread would take
longer."""

_UINT64 = np.dtype(np.uint64)


@dataclass(frozen=True, slots=True)
class RemoteProcess:
    """The process at the other end.

    Args:
        pid: its pid in this process's pid namespace; 0 if it is not visible there.
        started: see ``start_time``.
        refusal: why process_vm_readv can't access it; None if it can.
    """

    pid: int
    started: int | None
    refusal: str | None


class SharedRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The attachment of a region: whether peers are sent its descriptor, and its offset in that
    descriptor's file."""

    mappable: bool
    fd_offset: int


class ShmPeer:
    """Copies between this process and one other, and maps the regions that the other registers.

    ``_lock`` is held while a caller's thread copies or starts a copy, and while a region is
    removed, so that these do not interleave.

    Args:
        session: session to the peer; closed with this object.
        remote: the peer's process.
        local: this side's regions.
        copy_threads: threads for large copies.
    """

    def __init__(
        self,
        session: Session,
        remote: RemoteProcess,
        local: AttachedRegions,
        copy_threads: CopyThreads,
    ) -> None:
        self._session = session
        self._remote = remote
        self._local = local.table
        self._copy_threads = copy_threads
        self._regions = session.regions.table
        self._mappings: dict[int, SharedMapping] = {}
        self._running: set[CopyTransfer] = set()
        self.closed = False
        self._error: TransferError | None = None
        self._lock = threading.Lock()
        self._hooks = CopyHooks(self._explain, self._death, self._running.discard)

    def read(self, spans: Spans, *, timeout: float) -> CopyTransfer | FinishedTransfer:
        return self._move(spans, timeout, 0)

    def write(self, spans: Spans, *, timeout: float) -> CopyTransfer | FinishedTransfer:
        return self._move(spans, timeout, 1)

    def close(self) -> None:
        self.closed = True
        self.lost(PeerLost("shm: this side closed the connection"))
        self._session.close()

    def lost(self, error: TransferError) -> None:
        with self._lock:
            self._error = self._error or error
        for copy in list(self._running):
            copy.abort(error)
        with self._lock:
            for mapping in self._mappings.values():
                mapping.close()
            self._mappings.clear()
        # Not earlier: to the peer, the session's end means that its memory is not accessed any more
        self._session.hang_up()

    def registered(self, key: int, region: MemoryRegion, attachment: bytes, fd: int | None) -> None:
        shared = decode(attachment, SharedRange)
        if not shared.mappable or fd is None:
            return
        with self._lock:
            if self._error is not None:
                return
            try:
                self._mappings[key] = map_shared(fd, shared.fd_offset, region.nbytes)
            except (OSError, ValueError, OverflowError) as exc:
                logger.warning(
                    "shm: region %d of the peer can't be mapped (%s): using process_vm_readv",
                    key,
                    exc,
                )

    def revoked(self, key: int) -> None:
        with self._lock:  # spans are looked up and copied under it
            using = [copy for copy in self._running if key in copy.remote_keys]
        for copy in using:
            copy.abort(RegionRevoked("the peer revoked the region in mid-transfer"))
        with self._lock:
            mapping = self._mappings.pop(key, None)
        if mapping is not None:
            mapping.close()

    def forget_local(self, key: int) -> None:
        """Fail and drain the transfers of a region that this side has just revoked."""
        with self._lock:
            using = [copy for copy in self._running if key in copy.local_keys]
        for copy in using:
            copy.abort(RegionRevoked("this side revoked the local region"))

    def unreachable_region(self) -> str | None:
        """Return which of the peer's regions can be accessed neither through a mapping nor by a
        system call, and why; None if there is none."""
        unmapped = [key for key, _ in self._regions.items() if key not in self._mappings]
        if not unmapped or self._remote.refusal is None:
            return None
        return f"region {unmapped[0]} has no mappable descriptor, and {self._remote.refusal}"

    def _move(self, spans: Spans, timeout: float, write: int) -> CopyTransfer | FinishedTransfer:
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
        """Copy a small piece in the caller's thread; returns None if its region is not known
        yet."""
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
            failed = self._copy_threads.copier.call_one(self._remote.pid, write, here, there, size)
            return DONE if not failed else FinishedTransfer(self._explain(failed))

    def _move_many(self, spans: Spans, timeout: float, write: int) -> CopyTransfer:
        if self._copy_threads.error is not None:
            raise TransferError("shm: a copy thread failed") from self._copy_threads.error
        with self._lock:
            if self._error is not None:
                raise self._error
            index, at = self._local.find_all(spans.local, spans.nbytes)
            threads = self._copy_threads
            copy = CopyTransfer(
                timeout, index.touched(at), self._hooks, threads.copier, threads.count
            )
            self._running.add(copy)
        try:
            self._begin(copy, spans, write)
        except (RegionUnknown, RegionRevoked, OutOfBounds):
            self._copy_threads.call(lambda: self._begin_late(copy, spans, write))
            return copy
        except TransportUnavailable:
            self._running.discard(copy)  # it is not returned to the caller, who could end it
            raise
        if spans.total_bytes <= INLINE_BYTES:
            copy.run()
        else:
            self._copy_threads.share(copy)
        return copy

    def _begin_late(self, copy: CopyTransfer, spans: Spans, write: int) -> None:
        """Start a copy after the registrations that the peer has sent by now were processed."""
        try:
            self._session.barrier(max(copy.deadline - time.monotonic(), 0.0))
            self._begin(copy, spans, write)
        except TransferError as exc:
            copy.fail(exc)
        else:
            self._copy_threads.share(copy)

    def _begin(self, copy: CopyTransfer, spans: Spans, write: int) -> None:
        """Look up the remote spans and give the copy its job.

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: a span is in no region.
            TransportUnavailable: a span's memory can't be accessed.
        """
        with self._lock:
            index, at = self._regions.find_all(spans.remote, spans.nbytes)
            keys = index.touched(at)
            method = CopyMethod.MAPPING if keys <= self._mappings.keys() else CopyMethod.CALL
            if method is CopyMethod.CALL and self._remote.refusal is not None:
                raise TransportUnavailable(NAME, self._remote.refusal)
            if method is CopyMethod.MAPPING:
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

    def _death(self) -> TransferError | None:
        """Return an error if the peer is lost by now."""
        if self._error is not None:
            return self._error
        if self._session.is_hung_up():
            return PeerLost("shm: the peer closed or died in mid-transfer")
        return None

    def _explain(self, code: int) -> TransferError:
        gone = self._death()
        if gone is not None:
            return gone
        pid = self._remote.pid
        if code == errno.ESRCH or start_time(pid) != self._remote.started:
            return PeerLost(f"shm: process {pid} has ended")
        if code in (errno.EPERM, errno.ENOSYS):
            return TransportUnavailable(NAME, explain_refused_call(pid))
        if code == errno.EFAULT:
            return RegionUnknown("shm: registered memory is no longer mapped by its process")
        return TransferError(f"shm: copying failed: {errno.errorcode.get(code, code)}")
