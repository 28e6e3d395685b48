"""The tcp transport's byte streams in Python, where stream.c can't be used: for TLS, and on hosts
without a compiler.

Implements the protocol of stream.c. Bytes go through a staging buffer, which is one copy more than
in stream.c; still no Python code runs per piece.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import OutOfBounds, RegionRevoked, TransferError
from mooncake_hal.session.regions import RegionTable
from mooncake_hal.transport import Spans
from mooncake_hal.transports.spans import gather, scatter, vectors
from mooncake_hal.transports.strided_pieces import MAX_LEVELS, unpack_strides
from mooncake_hal.transports.tcp.native_streams import (
    CHUNK_BYTES,
    MAGIC,
    MAX_SPANS,
    READ,
    REPLY,
    REQUEST,
    TRAILER,
    WRITE,
    Operation,
    ReplyStatus,
    StreamOutcome,
)

STAGE_BYTES = 1 << 20

_NOTHING_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Ended(Exception):
    """Ends an operation or a served connection early, with a StreamOutcome or an errno."""

    def __init__(self, outcome: int) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class _Pipe:
    """A connection whose sends and receives call ``check`` repeatedly, which raises to end them."""

    def __init__(self, connection: socket.socket, check: Callable[[], None]) -> None:
        self._connection = connection
        self.check = check
        self.stage: NDArray[np.uint8] = np.empty(STAGE_BYTES, np.uint8)

    def send(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            self.check()
            try:
                view = view[self._connection.send(view) :]
            except _NOTHING_YET:
                continue
            except OSError as exc:
                raise _Ended(exc.errno or errno.EIO) from exc

    def receive_into(self, view: memoryview) -> None:
        while len(view):
            self.check()
            try:
                got = self._connection.recv_into(view)
            except _NOTHING_YET:
                continue
            except OSError as exc:
                raise _Ended(exc.errno or errno.EIO) from exc
            if not got:
                raise _Ended(StreamOutcome.CLOSED)
            view = view[got:]

    def receive(self, size: int) -> bytes:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def wait_for_request(self) -> None:
        """Block until there are bytes to receive."""
        if isinstance(self._connection, ssl.SSLSocket) and self._connection.pending():
            return
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll()

    def send_pieces(self, vector: NDArray[np.uint64]) -> None:
        gather(vector, self.stage)
        self.send(self.stage.data[: int(vector[:, 1].sum())])

    def receive_pieces(self, vector: NDArray[np.uint64]) -> None:
        size = int(vector[:, 1].sum())
        self.receive_into(self.stage.data[:size])
        scatter(self.stage, vector)

    def send_zeros(self, size: int) -> None:
        for part in _parts(size):
            self.send(bytes(part))

    def drain(self, size: int) -> None:
        for part in _parts(size):
            self.receive_into(self.stage.data[:part])


@dataclass(slots=True, eq=False)
class _Serving:
    """A connection that is being served.

    Args:
        table: address and length of the pieces that its current operation may access, [n, 2]; None:
            it has no operation.
        touching: lock that is held while it copies to or from these pieces.
        is_aborted: whether the memory has been revoked.
    """

    table: NDArray[np.uint64] | None = None
    touching: threading.Lock = field(default_factory=threading.Lock)
    is_aborted: bool = False

    def touch(self, copy: Callable[[], None]) -> ReplyStatus:
        """Copy to or from registered memory, unless it has been revoked."""
        with self.touching:
            if self.is_aborted:
                return ReplyStatus.REVOKED
            try:
                copy()
            except OSError:
                return ReplyStatus.FAULT
            return ReplyStatus.OK


class _Server:
    """Regions and connections of one endpoint; see the server part of stream.c."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.regions = RegionTable("this side")
        self.connections: set[_Serving] = set()

    def admit(self, serving: _Serving, table: NDArray[np.uint64], total: int) -> ReplyStatus:
        """Check an operation and record it for ``fence``, atomically."""
        with self.lock:
            status = self._check(table, total)
            serving.table, serving.is_aborted = table, False
            return status

    def fence(self, start: int, end: int) -> None:
        """Abort all operations that touch [start, end); returns once none of them copies any
        more."""
        with self.lock:
            for serving in self.connections:
                if _touches(serving.table, start, end):
                    with serving.touching:
                        serving.is_aborted = True

    def _check(self, table: NDArray[np.uint64], total: int) -> ReplyStatus:
        addresses, nbytes = table[:, 0].copy(), table[:, 1].copy()
        if not nbytes.all() or int(nbytes.sum()) != total:
            return ReplyStatus.MALFORMED
        try:
            self.regions.find_all(addresses, nbytes)
        except OutOfBounds:
            return ReplyStatus.OUT_OF_BOUNDS
        except RegionRevoked:
            return ReplyStatus.REVOKED
        except TransferError:
            return ReplyStatus.UNKNOWN
        return ReplyStatus.OK


class InterpretedStreams:
    """``Streams`` in plain Python, for TLS and for hosts without a compiler."""

    runs_inline = False

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}
        self._handles = itertools.count(1)

    def begin(self, operation: Operation, connection: socket.socket) -> None:
        operation.fd = connection.fileno()
        operation.status = ReplyStatus.OK

    def run(self, operation: Operation, connection: socket.socket, seconds: float) -> int:
        """Always runs the operation to its end; ``seconds`` is ignored."""

        def check() -> None:
            if operation.stop:
                raise _Ended(StreamOutcome.STOPPED)
            if time.monotonic_ns() > operation.deadline_ns:
                raise _Ended(StreamOutcome.LATE)

        try:
            _carry_out(operation, _Pipe(connection, check))
        except _Ended as exc:
            return exc.outcome
        except OSError as exc:
            return exc.errno or errno.EIO
        return StreamOutcome.DONE

    def run_one(
        self, operation: Operation, local: int, remote: int, nbytes: int, timeout: float
    ) -> int:
        """Never called, since ``runs_inline`` is False."""
        raise NotImplementedError("InterpretedStreams does not run in the caller's thread")

    def new_server(self) -> int:
        handle = next(self._handles)
        self._servers[handle] = _Server()
        return handle

    def free_server(self, handle: int) -> None:
        del self._servers[handle]

    def set_regions(self, handle: int, table: RegionTable) -> None:
        server = self._servers[handle]
        with server.lock:
            server.regions = table

    def fence(self, handle: int, start: int, end: int) -> None:
        self._servers[handle].fence(start, end)

    def serve(self, handle: int, connection: socket.socket, stop: ctypes.c_int32) -> int:
        server, serving = self._servers[handle], _Serving()

        def check() -> None:
            if stop.value:
                raise _Ended(StreamOutcome.STOPPED)

        pipe = _Pipe(connection, check)
        with server.lock:
            server.connections.add(serving)
        try:
            while True:
                pipe.wait_for_request()
                _serve_request(server, serving, pipe)
        except _Ended as exc:
            return exc.outcome
        finally:
            with server.lock:
                server.connections.discard(serving)


def _carry_out(operation: Operation, pipe: _Pipe) -> None:
    """Run an operation as the client."""
    spans = operation.keep[0]
    pipe.send(operation.request())
    if operation.write:
        for vector in vectors(spans.local, spans.nbytes, STAGE_BYTES):
            pipe.send_pieces(vector)
    magic, operation.status, operation.index = REPLY.unpack(pipe.receive(REPLY.size))
    if magic != MAGIC:
        raise _Ended(StreamOutcome.BROKEN)
    if not operation.write and operation.status == ReplyStatus.OK:
        _receive_chunks(operation, spans, pipe)


def _receive_chunks(operation: Operation, spans: Spans, pipe: _Pipe) -> None:
    moved = 0
    for vector in vectors(spans.local, spans.nbytes, STAGE_BYTES):
        for piece in _cut_at_chunk(vector, moved):
            pipe.receive_pieces(piece)
            moved += int(piece[:, 1].sum())
            if moved % CHUNK_BYTES and moved != operation.total:
                continue
            magic, operation.status = TRAILER.unpack(pipe.receive(TRAILER.size))
            if magic != MAGIC:
                raise _Ended(StreamOutcome.BROKEN)
            if operation.status != ReplyStatus.OK:
                return


def _serve_request(server: _Server, serving: _Serving, pipe: _Pipe) -> None:
    magic, kind, levels, count, total = REQUEST.unpack(pipe.receive(REQUEST.size))
    is_known = magic == MAGIC and kind in (READ, WRITE) and levels <= MAX_LEVELS
    if not is_known or not 0 < count <= MAX_SPANS // (1 + levels):
        raise _Ended(StreamOutcome.BROKEN)
    rows = pipe.receive(16 * (1 + levels) * count)
    try:
        table = np.stack(unpack_strides(rows, levels, MAX_SPANS), axis=1)
    except ValueError as exc:
        raise _Ended(StreamOutcome.BROKEN) from exc
    status = server.admit(serving, table, total)
    if status is not ReplyStatus.OK and kind == WRITE:
        pipe.drain(total)
    elif kind == WRITE:
        status = _serve_write(serving, pipe, table)
    pipe.send(REPLY.pack(MAGIC, status, 0))
    if status is ReplyStatus.OK and kind == READ:
        _serve_read(serving, pipe, table)


def _serve_write(serving: _Serving, pipe: _Pipe, table: NDArray[np.uint64]) -> ReplyStatus:
    left, status = int(table[:, 1].sum()), ReplyStatus.OK
    for vector in vectors(table[:, 0], table[:, 1], STAGE_BYTES):
        size = int(vector[:, 1].sum())
        pipe.receive_into(pipe.stage.data[:size])
        left -= size
        status = serving.touch(partial(scatter, pipe.stage, vector))
        if status is not ReplyStatus.OK:
            break
    pipe.drain(left)
    return status


def _serve_read(serving: _Serving, pipe: _Pipe, table: NDArray[np.uint64]) -> None:
    moved, total = 0, int(table[:, 1].sum())
    for vector in vectors(table[:, 0], table[:, 1], STAGE_BYTES):
        for piece in _cut_at_chunk(vector, moved):
            size = int(piece[:, 1].sum())
            status = serving.touch(partial(gather, piece, pipe.stage))
            if status is not ReplyStatus.OK:
                end = min(moved // CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES, total)
                pipe.send_zeros(end - moved)
                pipe.send(TRAILER.pack(MAGIC, status))
                return
            pipe.send(pipe.stage.data[:size])
            moved += size
            if moved % CHUNK_BYTES == 0 or moved == total:
                pipe.send(TRAILER.pack(MAGIC, ReplyStatus.OK))


def _cut_at_chunk(vector: NDArray[np.uint64], moved: int) -> list[NDArray[np.uint64]]:
    """Cut a vector in two if it crosses the end of the chunk at ``moved`` bytes into the stream."""
    left = CHUNK_BYTES - moved % CHUNK_BYTES
    size = int(vector[:, 1].sum())
    if size <= left:
        return [vector]
    addresses, nbytes = vector[:, 0].copy(), vector[:, 1].copy()
    return list(vectors(addresses, nbytes, left))


def _touches(table: NDArray[np.uint64] | None, start: int, end: int) -> bool:
    if table is None:
        return False
    begins, sizes = table[:, 0], table[:, 1]
    return bool(((begins < np.uint64(end)) & (begins + sizes > np.uint64(start))).any())


def _parts(size: int) -> list[int]:
    whole, rest = divmod(size, STAGE_BYTES)
    return [STAGE_BYTES] * whole + ([rest] if rest else [])
