"""One port of a NIC: its attributes, its queue pairs and its registered memory."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma import verbs
from mooncake_hal.transports.rdma.nic_memory import ACCESS, NicMemory, register_memory
from mooncake_hal.transports.rdma.rdma_messages import ETHERNET, INFINIBAND, NicInfo, QueuePairInfo
from mooncake_hal.transports.rdma.rdma_settings import Gid, GidKind, RdmaSettings, choose_gid
from mooncake_hal.transports.rdma.work_requests import SendBatch, WorkRequestArray

ChildT = TypeVar("ChildT", "NicMemory", "QueuePair")

MAX_READS = 16
MIN_RNR_TIMER = 12
RNR_RETRY_FOR_EVER = 7  # irrelevant: only receives can be "not ready", and none are posted here
HOP_LIMIT = 64
MAX_GID_INDEX = 255  # the index has eight bits in an address
IDLE_CQ_DEPTH = 16


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """The attributes of a port and its device.

    Args:
        link: INFINIBAND or ETHERNET.
        lid: local identifier; 0 on Ethernet.
        mtu: active MTU, as a value of the verbs' enum.
        max_message: maximum size of a request in bytes.
        max_requests: maximum number of requests in flight on a queue pair, such that a completion
            queue can hold their completions.
        served_reads, own_reads: concurrent RDMA READs, as their target and as their initiator.
        gids: the port's GID table, without entries of unknown types.
    """

    link: str
    lid: int
    mtu: int
    max_message: int
    max_requests: int
    served_reads: int
    own_reads: int
    gids: list[Gid]


def require_pyverbs() -> None:
    """Import pyverbs.

    Raises:
        TransportUnavailable: it is not installed, or not of the same release as libibverbs.
    """
    try:
        import pyverbs.device  # noqa: F401 - the module that loads libibverbs
    except ImportError as exc:
        raise TransportUnavailable("rdma", f"pyverbs does not load: {exc}") from exc


def query_port(device: str, port: int) -> PortAttributes:
    """Query a port's attributes with pyverbs; raises TransportUnavailable."""
    from pyverbs.device import Context
    from pyverbs.pyverbs_error import PyverbsError

    kinds = {kind.value for kind in GidKind}
    try:
        with Context(name=device) as context:
            found, limits = context.query_port(port), context.query_device()
            gids = [
                Gid(
                    entry.gid_index,
                    GidKind(entry.gid_type),
                    str(context.query_gid(port, entry.gid_index)),
                )
                for entry in context.query_gid_table(1024)
                if entry.port_num == port and entry.gid_type in kinds
            ]
    except PyverbsError as exc:
        raise TransportUnavailable("rdma", f"{device}:{port} can't be queried: {exc}") from exc
    return PortAttributes(
        link=INFINIBAND if found.link_layer == 1 else ETHERNET,
        lid=int(found.lid),
        mtu=int(found.active_mtu),
        max_message=int(found.max_msg_sz),
        max_requests=min(int(limits.max_qp_wr), int(limits.max_cqe)) // 2,
        served_reads=min(MAX_READS, int(limits.max_qp_rd_atom)),
        own_reads=min(MAX_READS, int(limits.max_qp_init_rd_atom)),
        gids=[gid for gid in gids if gid.index <= MAX_GID_INDEX],
    )


class Nic:
    """An open port: its device context, protection domain and address.

    Args:
        number: index among the endpoint's NICs.
        name: ``device:port``.
        settings: the endpoint's settings.

    Raises:
        TransportUnavailable: the port can't be opened or has no usable address.
    """

    def __init__(self, number: int, name: str, settings: RdmaSettings) -> None:
        device, _, port = name.partition(":")
        self.number = number
        self.name = name
        self.port = int(port or 1)
        self.settings = settings
        self.attributes = query_port(device, self.port)
        self.gid = choose_gid(self.attributes.gids, name, settings.gid_index)
        self.window = min(settings.window, self.attributes.max_requests)
        self.max_message = self.attributes.max_message
        self._changed = threading.Condition()
        self._children: set[NicMemory | QueuePair] = set()
        self._num_in_making = 0
        self._closed = False
        library = verbs.load()
        try:
            with ExitStack() as undo:
                self.context = verbs.open_device(device)
                undo.callback(library.ibv_close_device, self.context)
                self.pd = int(library.ibv_alloc_pd(self.context))
                undo.callback(library.ibv_dealloc_pd, self.pd)
                found = verbs.IbvPd.from_address(self.pd)
                verbs.check_layout("ibv_pd", {"context": (found.context, self.context)})
                # for queue pairs that only serve, which never have completions on this side
                self.idle_cq = int(
                    library.ibv_create_cq(self.context, IDLE_CQ_DEPTH, None, None, 0)
                )
                undo.callback(library.ibv_destroy_cq, self.idle_cq)
                self._undo = undo.pop_all()
        except OSError as exc:
            raise TransportUnavailable("rdma", f"{name} can't be opened: {exc}") from exc

    def info(self) -> NicInfo:
        """The information about the port that peers need."""
        return NicInfo(self.name, self.attributes.link, self.gid.text, self.attributes.lid)

    def register(self, region: MemoryRegion) -> NicMemory:
        """Register memory.

        Raises:
            TransportUnavailable: the kernel, driver or NIC rejects it; the message has the reason
                for each method that was tried.
        """
        return self._keep(
            lambda: NicMemory(self.name, register_memory(self.pd, region, self.name), self.discard)
        )

    def queue_pair(self, *, sends: bool = True) -> QueuePair:
        """Create a queue pair; raises TransportUnavailable.

        Args:
            sends: whether it will post requests; otherwise it only serves the peer's.
        """
        return self._keep(lambda: QueuePair(self, sends=sends))

    def close(self) -> None:
        """Close the port with all its queue pairs and registered memory. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_in_making)
            children = list(self._children)
        for child in children:
            child.close()
        self._undo.close()

    def discard(self, child: NicMemory | QueuePair) -> None:
        """Called by a child when it has been closed."""
        with self._changed:
            self._children.discard(child)

    def _keep(self, make: Callable[[], ChildT]) -> ChildT:
        # Counted instead of locked: pinning a large pool takes seconds, during which a broken
        # connection must be able to get a new queue pair. ``close`` waits until the count is 0.
        with self._changed:
            if self._closed:
                raise TransportUnavailable("rdma", f"{self.name} is closed")
            self._num_in_making += 1
        child = None
        try:
            child = make()
            return child
        finally:
            with self._changed:
                self._num_in_making -= 1
                if child is not None:
                    self._children.add(child)
                self._changed.notify_all()


class QueuePair:
    """A queue pair of a reliable connection. Created by ``Nic.queue_pair``.

    Every method is safe against a concurrent ``close``: underneath are pointers, and a call on a
    destroyed object would crash the process.
    """

    def __init__(self, nic: Nic, *, sends: bool) -> None:
        self.nic = nic
        self.fd = -1
        self._psn = secrets.randbits(24)
        self._lock = threading.Lock()
        self._closed = False
        try:
            with ExitStack() as undo:
                cq = self._create_cq(undo) if sends else nic.idle_cq
                self._create(undo, cq, sends)
                attr = verbs.IbvQpAttr(
                    qp_state=verbs.QPS_INIT, qp_access_flags=ACCESS, port_num=nic.port
                )
                self._library.ibv_modify_qp(self._qp, attr, verbs.TO_INIT)
                if sends:
                    self._poller.request_event()
                self._undo = undo.pop_all()
        except OSError as exc:
            raise TransportUnavailable("rdma", f"{nic.name}: no queue pair: {exc}") from exc

    def info(self) -> QueuePairInfo:
        """The information that the other end needs to connect to it."""
        nic = self.nic
        return QueuePairInfo(
            nic.number,
            nic.gid.text,
            nic.attributes.lid,
            self._qp_num,
            self._psn,
            nic.attributes.mtu,
            nic.attributes.served_reads,
        )

    def connect(self, remote: QueuePairInfo) -> None:
        """Connect to the other end, ready to send and to serve.

        Raises:
            TransportUnavailable: a verb failed, for example because there is no route.
        """
        nic, settings = self.nic, self.nic.settings
        to_receive = verbs.IbvQpAttr(
            qp_state=verbs.QPS_RTR,
            ah_attr=self._path(remote),
            path_mtu=min(nic.attributes.mtu, remote.mtu),
            dest_qp_num=remote.qpn,
            rq_psn=remote.psn,
            max_dest_rd_atomic=nic.attributes.served_reads,
            min_rnr_timer=MIN_RNR_TIMER,
        )
        to_send = verbs.IbvQpAttr(
            qp_state=verbs.QPS_RTS,
            sq_psn=self._psn,
            max_rd_atomic=max(1, min(nic.attributes.own_reads, remote.reads)),
            timeout=settings.timeout,
            retry_cnt=settings.retries,
            rnr_retry=RNR_RETRY_FOR_EVER,
        )
        try:
            with self._lock:
                self._require_open()
                self._library.ibv_modify_qp(self._qp, to_receive, verbs.TO_RTR)
                self._library.ibv_modify_qp(self._qp, to_send, verbs.TO_RTS)
        except OSError as exc:
            raise TransportUnavailable("rdma", f"{nic.name} to {remote.gid}: {exc}") from exc

    def post(self, requests: WorkRequestArray, batch: SendBatch, first_id: int) -> None:
        """Post a batch, numbered from ``first_id``; raises OSError if not all of it is accepted."""
        with self._lock:
            self._require_open()
            self._post(requests, batch, first_id)

    def completions(self, max_count: int) -> list[verbs.IbvWc]:
        """Return up to ``max_count`` work completions, valid until the next call; never blocks."""
        with self._lock:
            self._require_open()
            return self._poller.poll(max_count)

    def take_event(self) -> None:
        """Consume the event that made ``fd`` readable, and request the next one."""
        cq, context = ctypes.c_void_p(), ctypes.c_void_p()
        with self._lock:
            self._require_open()
            try:
                self._library.ibv_get_cq_event(
                    self._channel, ctypes.byref(cq), ctypes.byref(context)
                )
                self._library.ibv_ack_cq_events(self._cq, 1)
            except BlockingIOError:
                pass  # consumed before: ``fd`` is non-blocking
            self._poller.request_event()

    def close(self) -> None:
        """Destroy the queue pair: once this returns, its requests access no local memory.
        Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._undo.close()
        self.nic.discard(self)

    def _create_cq(self, undo: ExitStack) -> int:
        context = self.nic.context
        self._channel = int(self._library.ibv_create_comp_channel(context))
        undo.callback(self._library.ibv_destroy_comp_channel, self._channel)
        channel = verbs.IbvCompChannel.from_address(self._channel)
        verbs.check_layout("ibv_comp_channel", {"context": (channel.context, context)})
        self.fd = channel.fd
        os.set_blocking(self.fd, False)
        depth = self.nic.window + 1
        self._cq = int(self._library.ibv_create_cq(context, depth, None, self._channel, 0))
        undo.callback(self._library.ibv_destroy_cq, self._cq)
        cq = verbs.IbvCq.from_address(self._cq)
        verbs.check_layout(
            "ibv_cq",
            {"context": (cq.context, context), "channel": (cq.channel, self._channel)},
        )
        self._poller = verbs.CompletionPoller(self._cq)
        return self._cq

    def _create(self, undo: ExitStack, cq: int, sends: bool) -> None:
        nic = self.nic
        init = verbs.IbvQpInitAttr(send_cq=cq, recv_cq=cq, qp_type=verbs.QPT_RC, sq_sig_all=0)
        init.cap = verbs.IbvQpCap(
            max_send_wr=nic.window if sends else 1,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=nic.settings.inline_bytes if sends else 0,
        )
        self._qp = int(self._library.ibv_create_qp(nic.pd, init))
        undo.callback(self._library.ibv_destroy_qp, self._qp)
        made = verbs.IbvQp.from_address(self._qp)
        verbs.check_layout(
            "ibv_qp",
            {
                "context": (made.context, nic.context),
                "pd": (made.pd, nic.pd),
                "send_cq": (made.send_cq, cq),
                "qp_type": (made.qp_type, verbs.QPT_RC),
            },
        )
        self._qp_num = int(made.qp_num)
        self.inline_bytes = int(init.cap.max_inline_data)
        self._post = verbs.batch_poster(self._qp)

    def _path(self, remote: QueuePairInfo) -> verbs.IbvAhAttr:
        nic, settings = self.nic, self.nic.settings
        path = verbs.IbvAhAttr(port_num=nic.port, sl=settings.service_level)
        if nic.attributes.link == INFINIBAND:  # within one subnet, the LID is the whole address
            path.dlid = remote.lid
            return path
        path.is_global = 1
        path.grh = verbs.IbvGlobalRoute(
            dgid=verbs.IbvGid.from_buffer_copy(ipaddress.IPv6Address(remote.gid).packed),
            sgid_index=nic.gid.index,
            hop_limit=HOP_LIMIT,
            traffic_class=settings.traffic_class,
        )
        return path

    @property
    def _library(self) -> ctypes.CDLL:
        return verbs.load()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportUnavailable("rdma", f"a queue pair on {self.nic.name} is closed")
