"""ctypes bindings of libibverbs' public ABI: the objects and calls of the data path.

Why not pyverbs: it posts one Python object per request, which costs more than 2 µs per piece, and
no release of it exposes the address of the C object behind a Python object. So everything from the
opened device to the queue pair is created here, with functions that libibverbs exports. pyverbs is
used to query devices, ports, GIDs and limits.

Why ctypes and not a C file: one call posts a batch of up to a window of requests, so that the
microsecond of a ctypes call is divided over hundreds of pieces, and a serving host needs neither a
compiler nor headers. ctypes also releases the GIL around every call, which pyverbs does not.

This module relies on <infiniband/verbs.h>, whose ABI has not changed since libibverbs 1.1: programs
built then still run. ibv_post_send, ibv_poll_cq and ibv_req_notify_cq are inline functions there
that call through the table in struct ibv_context; this module calls through the same table. Structs
that the library allocates are declared up to the last field that is read; structs that we allocate
are declared in full. At run time it checks that every function exists, and that each object has the
values that it was created with.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_int,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from typing import Any

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transports.rdma.work_requests import WORK_REQUEST, SendBatch, WorkRequestArray

SONAME = "libibverbs.so.1"
POLL_BATCH = 32

ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ = 1, 2, 4
QPT_RC = 2
QPS_INIT, QPS_RTR, QPS_RTS = 1, 2, 3

# ibv_qp_attr_mask: the attributes that each state transition of a reliable connection sets
_STATE, _ACCESS, _PKEY, _PORT, _AV = 1 << 0, 1 << 3, 1 << 4, 1 << 5, 1 << 7
_PATH_MTU, _TIMEOUT, _RETRY, _RNR_RETRY = 1 << 8, 1 << 9, 1 << 10, 1 << 11
_RQ_PSN, _INITIATED_READS, _MIN_RNR_TIMER = 1 << 12, 1 << 13, 1 << 15
_SQ_PSN, _SERVED_READS, _DEST_QPN = 1 << 16, 1 << 17, 1 << 20
TO_INIT = _STATE | _PKEY | _PORT | _ACCESS
TO_RTR = _STATE | _AV | _PATH_MTU | _DEST_QPN | _RQ_PSN | _SERVED_READS | _MIN_RNR_TIMER
TO_RTS = _STATE | _TIMEOUT | _RETRY | _RNR_RETRY | _SQ_PSN | _INITIATED_READS


class IbvWc(Structure):
    """``struct ibv_wc``: a work completion; only ``wr_id`` and ``status`` are read."""

    _fields_ = (
        ("wr_id", c_uint64),
        ("status", c_int),
        ("opcode", c_int),
        ("vendor_err", c_uint32),
        ("byte_len", c_uint32),
        ("imm_data", c_uint32),
        ("qp_num", c_uint32),
        ("src_qp", c_uint32),
        ("wc_flags", c_uint32),
        ("pkey_index", c_uint16),
        ("slid", c_uint16),
        ("sl", c_uint8),
        ("dlid_path_bits", c_uint8),
    )


PostSend = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_void_p))
PollCq = CFUNCTYPE(c_int, c_void_p, c_int, POINTER(IbvWc))
ReqNotifyCq = CFUNCTYPE(c_int, c_void_p, c_int)

_OPERATIONS = (
    *("query_device", "query_port", "alloc_pd", "dealloc_pd", "reg_mr", "rereg_mr", "dereg_mr"),
    *("alloc_mw", "bind_mw", "dealloc_mw", "create_cq", "poll_cq", "req_notify_cq", "cq_event"),
    *("resize_cq", "destroy_cq", "create_srq", "modify_srq", "query_srq", "destroy_srq"),
    *("post_srq_recv", "create_qp", "query_qp", "modify_qp", "destroy_qp", "post_send"),
    *("post_recv", "create_ah", "destroy_ah", "attach_mcast", "detach_mcast", "async_event"),
)
_CALLED = {"poll_cq": PollCq, "req_notify_cq": ReqNotifyCq, "post_send": PostSend}


class IbvContextOps(Structure):
    """``struct ibv_context_ops``: the provider's functions; only three are called through it."""

    _fields_ = tuple((name, _CALLED.get(name, c_void_p)) for name in _OPERATIONS)


class IbvContext(Structure):
    """``struct ibv_context``, up to its mutex."""

    _fields_ = (
        ("device", c_void_p),
        ("ops", IbvContextOps),
        ("cmd_fd", c_int),
        ("async_fd", c_int),
        ("num_comp_vectors", c_int),
    )


class IbvPd(Structure):
    """``struct ibv_pd``."""

    _fields_ = (("context", c_void_p), ("handle", c_uint32))


class IbvMr(Structure):
    """``struct ibv_mr``."""

    _fields_ = (
        ("context", c_void_p),
        ("pd", c_void_p),
        ("addr", c_void_p),
        ("length", c_size_t),
        ("handle", c_uint32),
        ("lkey", c_uint32),
        ("rkey", c_uint32),
    )


class IbvCompChannel(Structure):
    """``struct ibv_comp_channel``."""

    _fields_ = (("context", c_void_p), ("fd", c_int), ("refcnt", c_int))


class IbvCq(Structure):
    """``struct ibv_cq``, up to its mutex."""

    _fields_ = (
        ("context", c_void_p),
        ("channel", c_void_p),
        ("cq_context", c_void_p),
        ("handle", c_uint32),
        ("cqe", c_int),
    )


class IbvQp(Structure):
    """``struct ibv_qp``, up to its mutex."""

    _fields_ = (
        ("context", c_void_p),
        ("qp_context", c_void_p),
        ("pd", c_void_p),
        ("send_cq", c_void_p),
        ("recv_cq", c_void_p),
        ("srq", c_void_p),
        ("handle", c_uint32),
        ("qp_num", c_uint32),
        ("state", c_int),
        ("qp_type", c_int),
    )


class IbvQpCap(Structure):
    """``struct ibv_qp_cap``."""

    _fields_ = (
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    )


class IbvQpInitAttr(Structure):
    """``struct ibv_qp_init_attr``; the library writes the granted capabilities to ``cap``."""

    _fields_ = (
        ("qp_context", c_void_p),
        ("send_cq", c_void_p),
        ("recv_cq", c_void_p),
        ("srq", c_void_p),
        ("cap", IbvQpCap),
        ("qp_type", c_int),
        ("sq_sig_all", c_int),
    )


class IbvGid(Structure):
    """``union ibv_gid``: sixteen bytes in network order, aligned like two 64-bit words."""

    _fields_ = (("words", c_uint64 * 2),)


class IbvGlobalRoute(Structure):
    """``struct ibv_global_route``."""

    _fields_ = (
        ("dgid", IbvGid),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    )


class IbvAhAttr(Structure):
    """``struct ibv_ah_attr``: an address."""

    _fields_ = (
        ("grh", IbvGlobalRoute),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    )


class IbvQpAttr(Structure):
    """``struct ibv_qp_attr``; a call's mask selects the fields that it reads."""

    _fields_ = (
        ("qp_state", c_int),
        ("cur_qp_state", c_int),
        ("path_mtu", c_int),
        ("path_mig_state", c_int),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32),
        ("cap", IbvQpCap),
        ("ah_attr", IbvAhAttr),
        ("alt_ah_attr", IbvAhAttr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
    )


def _check_pointer(result: Any, function: Any, arguments: Any) -> Any:
    if not result:
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")
    return result


def _check_status(result: int, function: Any, arguments: Any) -> int:
    if result:  # an errno, or -1 with errno set
        code = result if result > 0 else ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")
    return result


_DEVICES = POINTER(c_void_p)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ibv_get_device_list": (_DEVICES, (POINTER(c_int),)),
    "ibv_free_device_list": (None, (_DEVICES,)),
    "ibv_get_device_name": (ctypes.c_char_p, (c_void_p,)),
    "ibv_open_device": (c_void_p, (c_void_p,)),
    "ibv_close_device": (c_int, (c_void_p,)),
    "ibv_alloc_pd": (c_void_p, (c_void_p,)),
    "ibv_dealloc_pd": (c_int, (c_void_p,)),
    "ibv_reg_mr": (c_void_p, (c_void_p, c_void_p, c_size_t, c_int)),
    "ibv_dereg_mr": (c_int, (c_void_p,)),
    "ibv_create_comp_channel": (c_void_p, (c_void_p,)),
    "ibv_destroy_comp_channel": (c_int, (c_void_p,)),
    "ibv_create_cq": (c_void_p, (c_void_p, c_int, c_void_p, c_void_p, c_int)),
    "ibv_destroy_cq": (c_int, (c_void_p,)),
    "ibv_get_cq_event": (c_int, (c_void_p, POINTER(c_void_p), POINTER(c_void_p))),
    "ibv_ack_cq_events": (None, (c_void_p, ctypes.c_uint)),
    "ibv_create_qp": (c_void_p, (c_void_p, POINTER(IbvQpInitAttr))),
    "ibv_modify_qp": (c_int, (c_void_p, POINTER(IbvQpAttr), c_int)),
    "ibv_destroy_qp": (c_int, (c_void_p,)),
}
_SINCE_34: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ibv_reg_dmabuf_mr": (c_void_p, (c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int)),
}


@lru_cache(maxsize=1)
def load(name: str = SONAME) -> ctypes.CDLL:
    """Load libibverbs. A function that fails raises OSError with the function's name.

    Raises:
        TransportUnavailable: the library is not installed, or it is not rdma-core's.
    """
    try:
        library = ctypes.CDLL(name, use_errno=True)
    except OSError as exc:
        raise TransportUnavailable(
            "rdma", f"libibverbs does not load: {exc}; install rdma-core's libibverbs1"
        ) from exc
    missing = [function for function in _FUNCTIONS if not hasattr(library, function)]
    if missing:
        raise TransportUnavailable(
            "rdma", f"{name} has no {missing}: that is not rdma-core's; install libibverbs1"
        )
    for function, (result, arguments) in {**_FUNCTIONS, **_SINCE_34}.items():
        if not hasattr(library, function):
            continue
        found = getattr(library, function)
        found.restype, found.argtypes = result, arguments
        if result is not None:
            found.errcheck = _check_status if result is c_int else _check_pointer
    return library


def open_device(name: str) -> int:
    """Open a device by name; returns the address of its ``ibv_context``, which the caller closes
    with ibv_close_device.

    Raises:
        TransportUnavailable: libibverbs lists no such device, or its structs have another layout.
        OSError: the device can't be opened.
    """
    library = load()
    count = c_int()
    devices = library.ibv_get_device_list(byref(count))
    try:
        by_name = {library.ibv_get_device_name(at).decode(): at for at in devices[: count.value]}
        if name not in by_name:
            raise TransportUnavailable(
                "rdma",
                f"libibverbs lists no device {name!r}, it lists {sorted(by_name)}; is its provider "
                "installed (ibverbs-providers), and /dev/infiniband passed to the container?",
            )
        context = int(library.ibv_open_device(by_name[name]))
    finally:
        library.ibv_free_device_list(devices)
    opened = IbvContext.from_address(context)
    check_layout("ibv_context", {"device": (opened.device, by_name[name])})
    check_layout(
        "ibv_context",
        {
            "ops": (bool(opened.ops.post_send and opened.ops.poll_cq), True),
            "cmd_fd": (_is_device_file(opened.cmd_fd), True),  # checks the size of the whole table
        },
    )
    return context


def check_layout(struct: str, fields: dict[str, tuple[object, object]]) -> None:
    """Compare fields of a struct that the library allocated with the values it was created with.

    Args:
        struct: name of the struct in verbs.h.
        fields: (found, wanted) by the field's name.

    Raises:
        TransportUnavailable: they differ: the library's ABI is not the one declared here.
    """
    wrong = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
    if wrong:
        raise TransportUnavailable(
            "rdma",
            f"{SONAME} lays out struct {struct} differently from verbs.h: (found, wanted) is "
            f"{wrong}; use rdma-core's libibverbs on a 64-bit little-endian machine",
        )


def _is_device_file(fd: int) -> bool:
    try:
        return stat.S_ISCHR(os.fstat(fd).st_mode)
    except (OSError, OverflowError):
        return False


PostBatch = Callable[[WorkRequestArray, SendBatch, int], None]
"""Posts a batch whose requests are numbered from the last argument on; raises OSError if the NIC
does not accept all of it."""


def batch_poster(qp: int) -> PostBatch:
    """Return a function that posts to the ``ibv_qp`` at an address, until that is destroyed."""
    post_send = IbvContext.from_address(IbvQp.from_address(qp).context).ops.post_send
    bad = c_void_p()
    bad_reference = byref(bad)

    def post(requests: WorkRequestArray, batch: SendBatch, first_id: int) -> None:
        requests.fill(batch, first_id)
        code = post_send(qp, requests.address, bad_reference)
        if code:
            at = ((bad.value or requests.address) - requests.address) // WORK_REQUEST.itemsize
            raise OSError(code, f"ibv_post_send took {at} requests: {os.strerror(code)}")

    return post


class CompletionPoller:
    """Polls the ``ibv_cq`` at an address, until that is destroyed."""

    def __init__(self, cq: int) -> None:
        self._cq = cq
        operations = IbvContext.from_address(IbvCq.from_address(cq).context).ops
        self._poll = operations.poll_cq
        self._request_event = operations.req_notify_cq
        self._completions = (IbvWc * POLL_BATCH)()

    def poll(self, max_count: int) -> list[IbvWc]:
        """Return up to ``max_count`` completions, valid until the next call; raises OSError."""
        count = self._poll(self._cq, min(max_count, POLL_BATCH), self._completions)
        if count < 0:
            raise OSError(-count, "ibv_poll_cq failed")
        return self._completions[:count]

    def request_event(self) -> None:
        """Request an event for the next completion of any kind."""
        code = self._request_event(self._cq, 0)
        if code:
            raise OSError(code, f"ibv_req_notify_cq: {os.strerror(code)}")
