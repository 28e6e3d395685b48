"""The machine's limits with which transports are compared, measured in the same run: memcpy between
two buffers of one process, process_vm_readv from C, and a plain stream over as many sockets as a
transport has connections.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from mooncake_hal import native
from mooncake_hal.bench.transfer_speed import BUFFERS, Mover, TransferShape
from mooncake_hal.testing.transports_buffers import anonymous
from mooncake_hal.testing.transports_peer import PeerProcess
from mooncake_hal.transport import EndpointOptions, Spans
from mooncake_hal.transports.spans import split_spans

LOOPBACK = "127.0.0.1"


@contextmanager
def memcpy_mover(size: int, threads: int) -> Iterator[Mover]:
    """memcpy of the same pieces that a transport moves, in ``threads`` threads.

    Raises:
        NativeUnavailable: there is no compiler.
    """
    library = _library()
    with ExitStack() as stack:
        near, far = _buffer(stack, size), _buffer(stack, size)

        def copy(part: Spans) -> None:
            library.limit_memcpy(*_pointers(part), ctypes.c_uint64(len(part)))

        prepare = _spread(stack, threads, near, far, copy)
        yield Mover(f"memcpy, {threads} threads", prepare, lambda: 0.0)


@contextmanager
def readv_mover(size: int, threads: int) -> Iterator[Mover]:
    """process_vm_readv from C of the same pieces, in ``threads`` threads; reads only.

    Raises:
        NativeUnavailable: there is no compiler.
        OSError: the kernel denies the call.
    """
    library = _library()
    options = EndpointOptions(secret=b"bench")
    with ExitStack() as stack:
        child = stack.enter_context(PeerProcess("shm", f"{BUFFERS}anonymous", options, size))
        near = _buffer(stack, size)

        def copy(part: Spans) -> None:
            count = ctypes.c_uint64(len(part))
            if failed := library.limit_readv(child.pid, *_pointers(part), count):
                raise OSError(failed, os.strerror(failed))

        prepare = _spread(stack, threads, near, child.region.address, copy)
        yield Mover(f"process_vm_readv, {threads} threads", prepare, lambda: 0.0)


@contextmanager
def stream_mover(size: int, sockets: int) -> Iterator[Mover]:
    """Plain streams over loopback TCP, with the tcp transport's socket options; contiguous ranges
    only."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        port = listener.getsockname()[1]
        module = "mooncake_hal.bench.socket_stream"
        command = [sys.executable, "-m", module, str(port), str(sockets), str(size)]
        process = subprocess.Popen(command)
        stack.callback(process.wait)
        connections = [listener.accept()[0] for _ in range(sockets)]
        for connection in connections:
            stack.enter_context(connection)
            tune(connection)
        content = touched(stack, size)
        pool = stack.enter_context(ThreadPoolExecutor(sockets))
        share = size // sockets

        def receive(at: int) -> None:
            connections[at].sendall(b"go")
            view = content[at * share : (at + 1) * share]
            while len(view):
                view = view[connections[at].recv_into(view) :]

        def cpu_s() -> float:
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

        yield Mover(
            f"stream, {sockets} sockets",
            lambda shape, operation: lambda: list(pool.map(receive, range(sockets))),
            cpu_s,
        )


def _buffer(stack: ExitStack, size: int) -> int:
    """Allocate a buffer and touch its pages; returns its address."""
    buffer = anonymous(size)
    stack.callback(buffer.close)
    buffer.put(np.ones(size, np.uint8))
    return buffer.region.address


def _spread(
    stack: ExitStack, threads: int, near: int, far: int, copy: Callable[[Spans], None]
) -> Callable[[TransferShape, str], Callable[[], object]]:
    """Return a ``Mover.prepare`` that divides a shape's pieces over threads."""
    pool = stack.enter_context(ThreadPoolExecutor(threads))

    def prepare(shape: TransferShape, operation: str) -> Callable[[], object]:
        local, remote = (near, far) if operation == "read" else (far, near)
        parts = split_spans(shape.spans(local, remote), threads)
        return lambda: list(pool.map(copy, parts))

    return prepare


def _library() -> ctypes.CDLL:
    return native.compile_c("bench_limits", Path(__file__).with_name("limits.c").read_text())


def _pointers(spans: Spans) -> list[ctypes.c_void_p]:
    arrays = (spans.local, spans.remote, spans.nbytes)
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def touched(stack: ExitStack, size: int) -> memoryview:
    """Allocate memory of the same kind as in the transports' measurements; returns it as bytes."""
    address = _buffer(stack, size)
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def tune(connection: socket.socket) -> None:
    """Set the socket options that the tcp transport uses within a host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
