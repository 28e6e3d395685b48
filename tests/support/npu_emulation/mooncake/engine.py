"""mooncake's engine with its Ascend protocol, between processes of one host.

The memory of an emulated NPU belongs to its process. Another process asks it for its registered
regions, then reads and writes them through the kernel.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading

PAGE = 2 << 20
MOST_REGIONS = 256
ANSWER_S = 3.0
"""Timeout of an answer from a stopped process, in place of the engine's own."""
REFUSED = -1
_MOST_PIECES = 1024  # UIO_MAXIOV
_SET_PTRACER, _ANYBODY = 0x59616D61, -1

_libc = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


class TransferEngine:
    """See mooncake.engine.TransferEngine: calls return 0, or less where they fail."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        if metadata_server != "P2PHANDSHAKE" or protocol != "ascend":
            return REFUSED
        _libc.prctl(_SET_PTRACER, _ANYBODY, 0, 0, 0)  # fails if the kernel doesn't need it
        self._listener = socket.create_server((local_hostname, 0))
        known = (self._listener, self._lock, self._regions)  # not self, or it never ends
        threading.Thread(target=_answer, args=known, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return int(self._listener.getsockname()[1]) if self._listener else 0

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        with self._lock:
            if capacity <= 0 or buffer_addr % PAGE or len(self._regions) == MOST_REGIONS:
                return REFUSED
            self._regions[buffer_addr] = capacity
            return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        with self._lock:
            return 0 if self._regions.pop(buffer_addr, None) is not None else REFUSED

    def batch_transfer_sync_read(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        return self._move(_libc.process_vm_readv, target, buffers, peer_buffers, lengths)

    def batch_transfer_sync_write(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        return self._move(_libc.process_vm_writev, target, buffers, peer_buffers, lengths)

    def _move(
        self,
        call: ctypes._FuncPtr,
        target: str,
        ours: list[int],
        theirs: list[int],
        sizes: list[int],
    ) -> int:
        host, _, port = target.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=ANSWER_S) as asking:
                found = json.loads(asking.makefile().readline())
        except (OSError, ValueError):
            return REFUSED
        remote = {int(start): size for start, size in found["regions"].items()}
        with self._lock:
            local = dict(self._regions)
        if not (_holds(local, ours, sizes) and _holds(remote, theirs, sizes)):
            return REFUSED
        for first in range(0, len(sizes), _MOST_PIECES):
            some = slice(first, first + _MOST_PIECES)
            if not _copy(call, found["pid"], ours[some], theirs[some], sizes[some]):
                return REFUSED
        return 0

    def __del__(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _answer(listener: socket.socket, lock: threading.Lock, regions: dict[int, int]) -> None:
    """Send each client this process' id and registered regions until the engine is closed."""
    with listener:
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:
                return
            with asking, lock:
                facts = {"pid": os.getpid(), "regions": regions}
                asking.sendall(json.dumps(facts).encode() + b"\n")


def _holds(regions: dict[int, int], starts: list[int], sizes: list[int]) -> bool:
    return all(
        any(base <= start and start + size <= base + held for base, held in regions.items())
        for start, size in zip(starts, sizes, strict=True)
    )


def _copy(
    call: ctypes._FuncPtr, pid: int, ours: list[int], theirs: list[int], sizes: list[int]
) -> bool:
    count = len(sizes)
    local = (_Piece * count)(*zip(ours, sizes, strict=True))
    remote = (_Piece * count)(*zip(theirs, sizes, strict=True))
    call.restype = ctypes.c_ssize_t
    moved = call(ctypes.c_int(pid), local, count, remote, count, ctypes.c_ulong(0))
    return bool(moved == sum(sizes))
