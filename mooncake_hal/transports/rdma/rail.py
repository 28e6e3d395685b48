"""One port of one NIC, and queue pairs on it: the thin edge to pyverbs."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma.compat import PostBatch, batch_poster, open_channel, read_gids
from mooncake_hal.transports.rdma.facts import ETHERNET, INFINIBAND, LaneFacts, RailFacts
from mooncake_hal.transports.rdma.gids import choose_gid
from mooncake_hal.transports.rdma.memory import NicMemory, register
from mooncake_hal.transports.rdma.progress import is_readable
from mooncake_hal.transports.rdma.settings import RdmaSettings

MAX_READS = 16
MIN_RNR_TIMER = 12
RNR_RETRY_FOR_EVER = 7  # only receives can be "not ready", and nothing here is received
HOP_LIMIT = 64


class Rail:
    """A port that is up: its context, its protection domain, its address.

    Args:
        number: its place among the endpoint's rails.
        name: ``device:port``.
        settings: of the endpoint.
        enums: pyverbs' constants.

    Raises:
        TransportUnavailable: it can't be opened or has no usable address.
    """

    def __init__(self, number: int, name: str, settings: RdmaSettings, enums: ModuleType) -> None:
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError

        device, _, port = name.partition(":")
        self.number = number
        self.name = name
        self.port = int(port or 1)
        self.settings = settings
        self.enums = enums
        try:
            with ExitStack() as undo:
                self.context = Context(name=device)
                undo.callback(self.context.close)
                self._read_limits()
                self.pd = PD(self.context)
                self.idle_cq = CQ(self.context, 16)  # of queue pairs that only serve
                undo.pop_all()
        except PyverbsError as exc:
            raise TransportUnavailable("rdma", f"{name} can't be opened: {exc}") from exc

    @property
    def access(self) -> int:
        """Access flags of everything registered."""
        enums = self.enums
        flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        return int(flags | enums.IBV_ACCESS_REMOTE_READ)

    def facts(self) -> RailFacts:
        """What peers need to know of it."""
        return RailFacts(self.name, self.link, self.gid.text, self.lid)

    def register(self, region: MemoryRegion) -> NicMemory:
        """Register memory; see ``memory.register``."""
        return register(self.pd, region, self.access, self.name)

    def queue_pair(self) -> QueuePair:
        """Make a queue pair to post to; raises TransportUnavailable."""
        return QueuePair(self, sends=True)

    def close(self) -> None:
        """Close the port; everything on it is closed already."""
        self.idle_cq.close()
        self.pd.close()
        self.context.close()

    def _read_limits(self) -> None:
        port = self.context.query_port(self.port)
        device = self.context.query_device()
        self.link = INFINIBAND if port.link_layer == 1 else ETHERNET
        self.lid = int(port.lid)
        self.mtu = int(port.active_mtu)
        roomy = min(int(device.max_qp_wr), int(device.max_cqe)) // 2
        self.window = min(self.settings.window, roomy)
        self.max_message = int(port.max_msg_sz)
        self.served_reads = min(MAX_READS, int(device.max_qp_rd_atom))
        self.own_reads = min(MAX_READS, int(device.max_qp_init_rd_atom))
        table = read_gids(self.context, self.port)
        self.gid = choose_gid(table, self.name, self.settings.gid_index)


class QueuePair:
    """A reliable connection, from reset to ready to send.

    Args:
        rail: where it lives.
        sends: whether it is going to post requests; the other kind only serves its peer's.

    Raises:
        TransportUnavailable: the NIC makes none.
    """

    def __init__(self, rail: Rail, *, sends: bool) -> None:
        from pyverbs.cq import CQ
        from pyverbs.pyverbs_error import PyverbsError

        self.rail = rail
        self._psn = secrets.randbits(24)
        try:
            with ExitStack() as undo:
                self.cq, self.fd = rail.idle_cq, -1
                if sends:
                    self.channel, self.fd = open_channel(rail.context)
                    undo.callback(self.channel.close)
                    self.cq = CQ(rail.context, rail.window + 1, None, self.channel, 0)
                    undo.callback(self.cq.close)
                self.qp, self.inline_bytes = self._create(sends)
                undo.callback(self.qp.close)
                self._initialise()
                if sends:
                    self.cq.req_notify()
                self._undo = undo.pop_all()
        except PyverbsError as exc:
            raise TransportUnavailable("rdma", f"{rail.name}: no queue pair: {exc}") from exc

    def facts(self) -> LaneFacts:
        """What the other end needs to connect to it."""
        rail = self.rail
        return LaneFacts(
            rail.number,
            rail.gid.text,
            rail.lid,
            int(self.qp.qp_num),
            self._psn,
            rail.mtu,
            rail.served_reads,
        )

    def connect(self, remote: LaneFacts) -> None:
        """Make it ready to send to, and to serve, the other end.

        Raises:
            TransportUnavailable: the verbs refuse, such as for want of a route.
        """
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QPAttr

        rail, settings = self.rail, self.rail.settings
        attr = QPAttr(port_num=rail.port)
        attr.qp_access_flags = rail.access
        attr.path_mtu = min(rail.mtu, remote.mtu)
        attr.dest_qp_num = remote.qpn
        attr.rq_psn = remote.psn
        attr.sq_psn = self._psn
        attr.max_dest_rd_atomic = rail.served_reads
        attr.max_rd_atomic = max(1, min(rail.own_reads, remote.reads))
        attr.min_rnr_timer = MIN_RNR_TIMER
        attr.timeout = settings.timeout
        attr.retry_cnt = settings.retries
        attr.rnr_retry = RNR_RETRY_FOR_EVER
        try:
            attr.ah_attr = self._path(remote)
            self.qp.to_rtr(attr)
            self.qp.to_rts(attr)
        except (PyverbsError, OverflowError) as exc:  # a peer may send numbers that fit nowhere
            raise TransportUnavailable("rdma", f"{rail.name} to {remote.gid}: {exc}") from exc

    def poster(self) -> PostBatch:
        """Return the function that posts batches to it."""
        return batch_poster(self.qp, self.rail.enums)

    def completions(self, most: int) -> list[Any]:
        """Return up to ``most`` work completions; never blocks."""
        return list(self.cq.poll(most)[1])

    def take_event(self) -> None:
        """Take the event that made ``fd`` readable, and ask for the next one."""
        if is_readable(self.fd):  # and nobody else reads it: this can't block
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
        self.cq.req_notify()

    def close(self) -> None:
        """Destroy it: when this returns, no request of it touches memory here. Idempotent."""
        self._undo.close()

    def _create(self, sends: bool) -> tuple[Any, int]:
        from pyverbs.qp import QP, QPCap, QPInitAttr

        cap = QPCap(
            max_send_wr=self.rail.window if sends else 1,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=self.rail.settings.inline_bytes if sends else 0,
        )
        init = QPInitAttr(
            qp_type=self.rail.enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0
        )
        return QP(self.rail.pd, init), int(init.max_inline_data)

    def _initialise(self) -> None:
        from pyverbs.qp import QPAttr

        attr = QPAttr(port_num=self.rail.port)
        attr.qp_access_flags = self.rail.access
        attr.pkey_index = 0
        self.qp.to_init(attr)

    def _path(self, remote: LaneFacts) -> Any:
        from pyverbs.addr import GID, AHAttr, GlobalRoute

        rail, settings = self.rail, self.rail.settings
        level = settings.service_level
        if rail.link == INFINIBAND:  # one subnet: the local identifier is the whole address
            return AHAttr(port_num=rail.port, is_global=0, dlid=remote.lid, sl=level)
        route = GlobalRoute(
            dgid=GID(remote.gid),
            sgid_index=rail.gid.index,
            hop_limit=HOP_LIMIT,
            traffic_class=settings.traffic_class,
        )
        return AHAttr(port_num=rail.port, is_global=1, gr=route, dlid=0, sl=level)
