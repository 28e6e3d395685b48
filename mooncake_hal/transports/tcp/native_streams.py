"""The tcp transport's byte streams in C: stream.c, called through ctypes; and the ``Streams``
interface."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal import native
from mooncake_hal.errors import (
    OutOfBounds,
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferCancelled,
    TransferError,
)
from mooncake_hal.session.regions import RegionTable
from mooncake_hal.transport import Spans
from mooncake_hal.transports.strided_pieces import num_levels, pack_strides

MAGIC = 0x3154484D
CHUNK_BYTES = 64 << 20
REQUEST = struct.Struct("<IHHQQ")
REPLY = struct.Struct("<IIQ")
TRAILER = struct.Struct("<II")
READ, WRITE = 1, 2
"""Constants and frames of the protocol; described in stream.c."""

INLINE_SECONDS = 0.001
"""How long a small transfer runs in its caller's thread before the connection's thread takes
over."""

MAX_SPANS = 1 << 20
"""Maximum number of spans in one request; the server rejects more."""


class StreamOutcome(IntEnum):
    """How a call that runs an operation ended; positive values are errno numbers."""

    DONE = 0
    AGAIN = -1
    STOPPED = -2
    LATE = -3
    CLOSED = -4
    BROKEN = -5


class ReplyStatus(IntEnum):
    """Status in the server's reply."""

    OK = 0
    UNKNOWN = 1
    REVOKED = 2
    OUT_OF_BOUNDS = 3
    MALFORMED = 4
    FAULT = 5


class Operation(ctypes.Structure):
    """A read or write on one connection. The layout is that of ``struct operation`` in stream.c,
    whose private fields are left opaque here."""

    _fields_ = (
        ("local", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("total", ctypes.c_uint64),
        ("frame", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_int64),
        ("fd", ctypes.c_int32),
        ("write", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("status", ctypes.c_uint32),
        ("levels", ctypes.c_uint32),
        ("index", ctypes.c_uint64),
        ("private", ctypes.c_uint64 * 32),
    )
    keep: tuple[Spans, NDArray[np.uint8]]

    def request(self) -> memoryview:
        """Fill in and return the complete request frame, rows included."""
        frame = self.keep[1].data
        kind = WRITE if self.write else READ
        REQUEST.pack_into(frame, 0, MAGIC, kind, self.levels, self.rows, self.total)
        return frame

    def remote_span(self, index: int) -> tuple[int, int]:
        """Return the address and length of one of the remote spans."""
        at = 8 * min(index, self.count - 1)
        word = ctypes.c_uint64.from_address
        return word(self.remote + at).value, word(self.nbytes + at).value


def make_operation(spans: Spans, *, write: bool, deadline: float) -> Operation:
    """Create an operation, which keeps its arrays alive.

    Args:
        spans: the spans to move, at least one.
        write: whether the bytes are written to the peer; otherwise they are read.
        deadline: ``time.monotonic`` value by which it must be done.
    """
    rows = pack_strides(spans.remote, spans.nbytes)
    frame = np.empty(REQUEST.size + rows.nbytes, np.uint8)
    frame[REQUEST.size :] = rows.reshape(-1).view(np.uint8)
    operation = Operation(
        local=spans.local.ctypes.data,
        remote=spans.remote.ctypes.data,
        nbytes=spans.nbytes.ctypes.data,
        count=len(spans),
        total=spans.total_bytes,
        frame=frame.ctypes.data,
        rows=len(rows),
        levels=num_levels(rows),
        deadline_ns=int(min(deadline, 2.0**33) * 1e9),
        write=write,
    )
    operation.keep = (spans, frame)
    return operation


class Streams(Protocol):
    """An implementation of the protocol: runs operations as the client, and serves peers'
    operations."""

    @property
    def runs_inline(self) -> bool:
        """Whether ``run`` can return early and be continued later."""
        ...

    def begin(self, operation: Operation, connection: socket.socket) -> None:
        """Prepare an operation's request for a connection."""
        ...

    def run(self, operation: Operation, connection: socket.socket, seconds: float) -> int:
        """Run an operation until it is over or, if ``seconds`` is not 0, that time has passed.

        Returns:
            A StreamOutcome or an errno. After DONE, ``operation.status`` is the server's status;
            after AGAIN, the operation can be continued.
        """
        ...

    def run_one(
        self, operation: Operation, local: int, remote: int, nbytes: int, timeout: float
    ) -> int:
        """Begin an operation of one span and run it for up to INLINE_SECONDS; see ``run``."""
        ...

    def new_server(self) -> int:
        """Create a server's table of regions and connections; returns its handle."""
        ...

    def free_server(self, handle: int) -> None:
        """Free a server; none of its connections may be served any more."""
        ...

    def set_regions(self, handle: int, table: RegionTable) -> None:
        """Serve exactly the regions that ``table`` has now."""
        ...

    def fence(self, handle: int, start: int, end: int) -> None:
        """Abort all served operations that touch [start, end); returns once none does any more."""
        ...

    def serve(self, handle: int, connection: socket.socket, stop: ctypes.c_int32) -> int:
        """Serve a connection until it ends; returns a StreamOutcome or an errno."""
        ...


class NativeStreams:
    """``Streams`` implemented by stream.c.

    Raises:
        NativeUnavailable: stream.c can't be compiled here.
    """

    runs_inline = True

    def __init__(self) -> None:
        source = Path(__file__).with_name("stream.c").read_text()
        library = native.compile_c("tcp_stream", source)
        library.mooncake_operation_size.restype = ctypes.c_uint64
        if library.mooncake_operation_size() > ctypes.sizeof(Operation):
            raise AssertionError("struct operation of stream.c has outgrown streams.Operation")
        self._begin = _function(library, "mooncake_begin", None, ctypes.POINTER(Operation))
        self._run = _function(
            library, "mooncake_run", ctypes.c_int, ctypes.POINTER(Operation), ctypes.c_int64
        )
        pointer, wide, real = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double
        kinds = (ctypes.POINTER(Operation), wide, wide, wide, real, real)
        self._one = _function(library, "mooncake_one", ctypes.c_int, *kinds)
        self._new = _function(library, "mooncake_server_new", pointer)
        self._free = _function(library, "mooncake_server_free", None, pointer)
        self._set = _function(
            library, "mooncake_server_set", ctypes.c_int, pointer, pointer, wide, wide
        )
        self._fence = _function(library, "mooncake_server_fence", None, pointer, wide, wide)
        self._serve = _function(
            library, "mooncake_serve", ctypes.c_int, pointer, ctypes.c_int, pointer
        )

    def begin(self, operation: Operation, connection: socket.socket) -> None:
        operation.fd = connection.fileno()
        self._begin(operation)

    def run(self, operation: Operation, connection: socket.socket, seconds: float) -> int:
        until = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0
        return int(self._run(operation, until))

    def run_one(
        self, operation: Operation, local: int, remote: int, nbytes: int, timeout: float
    ) -> int:
        return int(self._one(operation, local, remote, nbytes, timeout, INLINE_SECONDS))

    def new_server(self) -> int:
        handle: int | None = self._new()
        if handle is None:
            raise MemoryError("no memory for a tcp server")
        return handle

    def free_server(self, handle: int) -> None:
        self._free(handle)

    def set_regions(self, handle: int, table: RegionTable) -> None:
        index, revoked = table.index, table.revoked_ranges()
        live = zip(index.starts, index.ends, strict=True)
        words = np.array([*live, *revoked], np.uint64).reshape(-1)
        if self._set(handle, words.ctypes.data, len(index.keys), len(revoked)):
            raise MemoryError("no memory for the table of regions")

    def fence(self, handle: int, start: int, end: int) -> None:
        self._fence(handle, start, end)

    def serve(self, handle: int, connection: socket.socket, stop: ctypes.c_int32) -> int:
        return int(self._serve(handle, connection.fileno(), ctypes.addressof(stop)))


def failure(operation: Operation, outcome: int) -> TransferError | None:
    """Return the error for an operation's outcome, None for success. Callers handle LATE
    themselves."""
    if outcome == StreamOutcome.DONE:
        return _refusal(operation)
    if outcome == StreamOutcome.STOPPED:
        return TransferCancelled("stopped by this side")
    if outcome in (StreamOutcome.CLOSED, errno.ECONNRESET, errno.EPIPE):
        return PeerLost("tcp: the peer closed the connection or died in mid-transfer")
    if outcome == StreamOutcome.BROKEN:
        return PeerLost("tcp: the peer broke the protocol")
    if outcome == errno.EFAULT:
        return RegionUnknown("tcp: registered local memory is no longer mapped")
    return PeerLost(f"tcp: the connection failed: {os.strerror(outcome)}")


def _refusal(operation: Operation) -> TransferError | None:
    if operation.status == ReplyStatus.OK:
        return None
    kinds: dict[int, tuple[type[TransferError], str]] = {
        ReplyStatus.UNKNOWN: (RegionUnknown, "lies in no region that the peer registered"),
        ReplyStatus.REVOKED: (RegionRevoked, "has been revoked by the peer"),
        ReplyStatus.OUT_OF_BOUNDS: (OutOfBounds, "begins in a peer's region and ends outside it"),
        ReplyStatus.FAULT: (RegionUnknown, "is registered, but no longer mapped by the peer"),
    }
    kind, what = kinds.get(operation.status, (PeerLost, "was rejected as malformed by the peer"))
    start, nbytes = operation.remote_span(operation.index)
    return kind(f"tcp: remote [{start:#x}, {start + nbytes:#x}) {what}")


def _function(library: ctypes.CDLL, name: str, result: object, *arguments: object):  # type: ignore[no-untyped-def]
    function = getattr(library, name)
    function.restype = result
    function.argtypes = list(arguments)
    return function
