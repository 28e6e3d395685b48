"""Everything that differs between releases of pyverbs (44 to 64), or that none of them offers.

* The enums are ``pyverbs.enums`` before 50 and ``pyverbs.libibverbs_enums`` since.
* ``CompChannel.fd`` exists since 57; before, the descriptor is the one that appears.
* ``SendWR`` and ``SGE`` leak in every release up to 64 unless closed, and closing one twice frees
  it twice: they are used on the slow path only, and closed exactly once there.
* ``ibv_qp`` is not exposed by any release. It is found inside the Python object and checked
  against what pyverbs says about the queue pair; where that fails, the slow path runs.
* ``DmaBufMR`` registers with iova = offset, so such memory is addressed from its offset.
* No verb releases the GIL: events are only taken when ``select`` says that there is one.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transports.rdma.gids import Gid, GidKind
from mooncake_hal.transports.rdma.requests import (
    SEND_INLINE,
    SEND_SIGNALED,
    WORK_REQUEST,
    Batch,
    RequestArray,
)

logger = logging.getLogger(__name__)

PostBatch = Callable[[RequestArray, Batch, int], None]
"""Posts a batch whose requests are numbered from the int; OSError if the NIC takes it not whole."""

_QPT_RC = 2
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_POST_SEND_OFFSET = _POINTER * (1 + 25)  # in ibv_context: after `device`, the 26th of its ops
_CMD_FD_OFFSET = _POINTER * (1 + 32)
_EVENT_FD_NAME = "[infinibandevent]"

_PostSend = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
_channel_lock = threading.Lock()  # opening a channel compares the process's descriptors


class QueuePairStruct(ctypes.Structure):
    """The beginning of ``struct ibv_qp``, stable since libibverbs 1.1."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("qp_context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("send_cq", ctypes.c_void_p),
        ("recv_cq", ctypes.c_void_p),
        ("srq", ctypes.c_void_p),
        ("handle", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("state", ctypes.c_int),
        ("qp_type", ctypes.c_int),
    )


def import_enums() -> ModuleType:
    """Return the module with pyverbs' IBV_ constants.

    Raises:
        TransportUnavailable: pyverbs is absent, or is not of libibverbs' release.
    """
    try:
        try:
            import pyverbs.libibverbs_enums as enums
        except ModuleNotFoundError as exc:
            if exc.name != "pyverbs.libibverbs_enums":
                raise
            import pyverbs.enums as enums
        importlib.import_module("pyverbs.device")  # the first one that loads libibverbs
    except ImportError as exc:
        raise TransportUnavailable("rdma", f"pyverbs does not load: {exc}") from exc
    module: ModuleType = enums
    return module


def open_channel(context: Any) -> tuple[Any, int]:
    """Open a completion channel; return it and its descriptor, made non-blocking."""
    from pyverbs.cq import CompChannel

    with _channel_lock:
        before = _event_fds()
        channel = CompChannel(context)
        fd = getattr(channel, "fd", None)
        if fd is None:
            (fd,) = _event_fds() - before
    os.set_blocking(fd, False)
    return channel, int(fd)


def _event_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if _EVENT_FD_NAME in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # closed since it was listed
            continue
    return found


def read_gids(context: Any, port: int) -> list[Gid]:
    """Return a port's GID table; entries of kinds that are not known here are left out."""
    known = {kind.value for kind in GidKind}
    return [
        Gid(entry.gid_index, GidKind(entry.gid_type), str(context.query_gid(port, entry.gid_index)))
        for entry in context.query_gid_table(1024)
        if entry.port_num == port and entry.gid_type in known
    ]


def register_dmabuf(pd: Any, nbytes: int, access: int, fd: int, offset: int) -> tuple[Any, int]:
    """Register a piece of a dma-buf; return the MR and the address that its first byte gets."""
    from pyverbs.mr import DmaBufMR

    return DmaBufMR(pd, nbytes, access, dmabuf=fd, offset=offset), offset


def batch_poster(qp: Any, enums: ModuleType) -> PostBatch:
    """Return how to post to a pyverbs QP: arrays through libibverbs, or else objects."""
    pointer = _find_struct(qp)
    if pointer is not None:
        return array_poster(pointer)
    logger.warning(
        "posting through pyverbs objects, about 2 µs more per piece: the queue pair's structure "
        "was not found in this release of pyverbs"
    )
    return _object_poster(qp, enums)


def array_poster(pointer: int) -> PostBatch:
    struct = QueuePairStruct.from_address(pointer)
    post_send = _PostSend(_word(struct.context + _POST_SEND_OFFSET))
    bad = ctypes.c_void_p()
    bad_reference = ctypes.byref(bad)

    def post(requests: RequestArray, batch: Batch, first_id: int) -> None:
        requests.fill(batch, first_id)
        code = post_send(pointer, requests.address, bad_reference)
        if code:
            at = ((bad.value or requests.address) - requests.address) // WORK_REQUEST.itemsize
            raise OSError(code, f"ibv_post_send took {at} requests: {os.strerror(code)}")

    return post


def _object_poster(qp: Any, enums: ModuleType) -> PostBatch:
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.wr import SGE, SendWR

    def post(requests: RequestArray, batch: Batch, first_id: int) -> None:
        count = requests.fill(batch, first_id)
        chain: list[Any] = []
        try:
            for at in reversed(range(count)):
                request, piece = requests.requests[at], requests.pieces[at]
                sge = SGE(int(piece["addr"]), int(piece["length"]), int(piece["lkey"]))
                send = SendWR(
                    int(request["wr_id"]),
                    int(request["opcode"]),
                    1,
                    0,
                    [sge],
                    int(request["send_flags"]),
                    chain[-1] if chain else None,
                )
                sge.close()
                send.set_wr_rdma(int(request["rkey"]), int(request["remote_addr"]))
                chain.append(send)
            qp.post_send(chain[-1])
        except PyverbsError as exc:
            raise OSError(getattr(exc, "error_code", 0), f"ibv_post_send: {exc}") from exc
        finally:
            for send in chain:
                send.close()

    assert (SEND_SIGNALED, SEND_INLINE) == (enums.IBV_SEND_SIGNALED, enums.IBV_SEND_INLINE)
    return post


def _find_struct(qp: Any) -> int | None:
    """Return the address of the ``ibv_qp`` that a pyverbs QP holds, or None if it can't be told.

    Every word of the object is tried as a pointer, through the kernel, which refuses bad ones
    instead of crashing us; the right one points at this QP's number, type and device.
    """
    size = type(qp).__basicsize__
    words = (ctypes.c_uint64 * (size // _POINTER)).from_address(id(qp))
    for word in words[2:]:  # past the reference count and the type
        try:
            struct = QueuePairStruct.from_buffer_copy(_peek(word, ctypes.sizeof(QueuePairStruct)))
            if (struct.qp_num, struct.qp_type) != (qp.qp_num, _QPT_RC) or not struct.context:
                continue
            fd = int.from_bytes(_peek(struct.context + _CMD_FD_OFFSET, 4), "little")
            if "uverbs" in os.readlink(f"/proc/self/fd/{fd}"):
                return int(word)
        except (OSError, OverflowError, ValueError):
            continue
    return None


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _peek(address: int, size: int) -> bytes:
    """Read our own memory; OSError or ValueError where there is none."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        data = os.pread(memory.fileno(), size, address)
    if len(data) != size:
        raise ValueError(f"{address:#x} is not readable")
    return data
