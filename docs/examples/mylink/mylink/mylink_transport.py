"""A transport that sends data as requests of the session itself: slow, but complete.

A data path describes memory to peers, replies to their requests, and creates peers. The endpoint
authenticates connections, keeps the registered regions, and handles revocation and lost peers.
"""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from mooncake_hal.errors import PeerLost, RequestRejected, TransferError, TransportUnavailable
from mooncake_hal.session.addressing import host_identity
from mooncake_hal.session.regions import AttachedRegions, check_spans
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Spans, Transfer
from mooncake_hal.transports.session_endpoint import (
    DataPath,
    DataPathPeer,
    compare_addresses,
    open_endpoint,
)
from mooncake_hal.transports.spans import cut
from mooncake_hal.transports.transfers import DONE, RunningTransfer, deadline_after

NAME, VERSION, PIECE_BYTES = "mylink", 1, 1 << 20
# The only request: (address, nbytes, content) reads a piece of memory or, with content, writes it.
encode, Copy = msgspec.msgpack.encode, msgspec.msgpack.Decoder(tuple[int, int, bytes])


class MyLinkDataPath(DataPath):
    name, version = NAME, VERSION

    def __init__(self, local: AttachedRegions) -> None:
        self._local = local
        self._lock = threading.Lock()  # held while local memory is accessed

    def info(self) -> bytes:
        return host_identity().encode()

    def unreachable_reason(self, info: bytes) -> str | None:
        return unreachable_reason(self.info(), info)

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        if region.device != "cpu":
            raise TransportUnavailable(NAME, f"it can't reach memory of {region.device}")
        return b""  # a NIC's keys, for a link that has one

    def detach(self, key: int) -> None:
        with self._lock:  # ``_local`` has dropped it: requests that take the lock later are refused
            pass

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        try:
            address, nbytes, content = Copy.decode(payload)
        except msgspec.DecodeError as exc:
            raise PeerLost(f"mylink: the peer sent an invalid request: {exc}") from exc
        with self._lock:
            self._local.table.find(address, nbytes)  # the reply, if it raises
            if not content:
                return ctypes.string_at(address, nbytes)
            ctypes.memmove(address, content, min(nbytes, len(content)))
            return b""

    def connect(self, session: Session, info: bytes, timeout: float) -> MyLinkPeer:
        return MyLinkPeer(session, self._local, self._lock)


class MyLinkPeer(DataPathPeer):  # inherits lost, a no-op: the session failed pending requests
    closed = False

    def __init__(self, session: Session, local: AttachedRegions, lock: threading.Lock) -> None:
        self._session, self._local, self._lock = session, local, lock
        self._pool = ThreadPoolExecutor(2, NAME)

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(spans, timeout, is_read=True)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(spans, timeout, is_read=False)

    def close(self) -> None:
        self.closed = True
        self._session.close()
        self._pool.shutdown()

    def _start(self, spans: Spans, timeout: float, *, is_read: bool) -> Transfer:
        check_spans(spans)
        if not len(spans):
            return DONE
        if self.closed:
            raise PeerLost("mylink: this side closed the connection")
        self._local.locate(spans.local, spans.nbytes)  # raises here, as the contract requires
        stop = threading.Event()
        transfer = RunningTransfer(1, deadline_after(timeout), lambda: (stop.set(), work.cancel()))
        work = self._pool.submit(self._run, transfer, spans, stop, is_read=is_read)
        work.add_done_callback(lambda work: work.cancelled() and transfer.part_ended(None))
        return transfer  # if it is cancelled before a thread runs it, it ends at once

    def _run(
        self, transfer: RunningTransfer, spans: Spans, stop: threading.Event, *, is_read: bool
    ) -> None:
        error: TransferError | None = None
        try:
            self._session.locate(spans.remote, spans.nbytes, transfer.deadline - time.monotonic())
            pieces = cut(spans.local, spans.remote, spans.nbytes, PIECE_BYTES)
            for local, remote, nbytes in np.stack(pieces[:3], axis=1).tolist():
                left = transfer.deadline - time.monotonic()
                if stop.is_set() or left <= 0:
                    error = transfer.late()  # ignored if the transfer has failed before
                    break
                content = b"" if is_read else ctypes.string_at(local, nbytes)
                found = self._session.request(encode((remote, nbytes, content)), left)
                with self._lock:
                    self._local.table.find(local, nbytes)  # raises if it was revoked since
                    if is_read:
                        ctypes.memmove(local, found, nbytes)
        except RequestRejected as exc:
            error = exc
            try:  # the peer may have revoked the region, for which the contract has its own error
                self._session.barrier(1.0)
                self._session.regions.locate(spans.remote, spans.nbytes)
            except TransferError as reason:
                error = reason
        except TransferError as exc:
            error = exc
        transfer.part_ended(error)


class MyLinkTransport:
    name, can_revoke, stops_writes_on_failure = NAME, True, False

    def open(self, options: EndpointOptions) -> Endpoint:
        if options.extra:
            raise ValueError(f"mylink has no extra settings, got {sorted(options.extra)}")
        local = AttachedRegions("this side")
        # ``shared_fd`` puts sessions on a Unix socket; without it they use TCP.
        return open_endpoint(MyLinkDataPath(local), local, options, shared_fd=lambda region: None)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return compare_addresses((local, remote), NAME, VERSION, bytes, unreachable_reason)


def unreachable_reason(ours: bytes, theirs: bytes) -> str | None:
    return None if ours == theirs else "the peer is on another host"
