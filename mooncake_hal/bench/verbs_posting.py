"""Benchmark of the CPU cost of posting to an RDMA NIC, without a NIC.

The rdma transport's own peer, windows and work requests post to a queue pair that is backed by a C
function: it accepts requests like the driver of real hardware and completes them immediately. So
the measurement covers all work that this process does per transfer: looking up, cutting and
striping the spans, building and posting the requests, and handling events and completions.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_hal import native
from mooncake_hal.bench.transfer_speed import TransferShape
from mooncake_hal.errors import PeerLost
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.frames import Seal, Seals
from mooncake_hal.session.listener import ProvenSocket
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session, reject_requests
from mooncake_hal.testing.transports_buffers import anonymous
from mooncake_hal.transport import MemoryRegion, Peer
from mooncake_hal.transports.rdma import verbs
from mooncake_hal.transports.rdma.progress_thread import ProgressThread
from mooncake_hal.transports.rdma.rdma_connection import RdmaConnection
from mooncake_hal.transports.rdma.rdma_messages import QueuePairInfo, RegionKeys
from mooncake_hal.transports.rdma.rdma_peer import RdmaPeer
from mooncake_hal.transports.rdma.rdma_settings import RdmaSettings
from mooncake_hal.transports.rdma.work_requests import RegionKeyTables

SECONDS = 30.0
CONNECTIONS = 2


class WirelessQueuePair:
    """A queue pair whose requests complete when they are posted; see ``SendingQueuePair``."""

    inline_bytes = 28

    def __init__(self) -> None:
        self._library = _library()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._nic = ctypes.create_string_buffer(self._library.wireless_size())
        self._library.wireless_open(self._nic, self.fd)
        self._context = verbs.IbvContext()
        self._context.ops.post_send = verbs.PostSend(("wireless_post_send", self._library))
        self._context.ops.poll_cq = verbs.PollCq(("wireless_poll_cq", self._library))
        self._context.ops.req_notify_cq = verbs.ReqNotifyCq(("wireless_arm", self._library))
        context, nic = ctypes.addressof(self._context), ctypes.addressof(self._nic)
        self._qp = verbs.IbvQp(context=context, qp_context=nic)
        self._cq = verbs.IbvCq(context=context, cq_context=nic)
        self.post = verbs.batch_poster(ctypes.addressof(self._qp))
        self._poller = verbs.CompletionPoller(ctypes.addressof(self._cq))
        self._poller.request_event()

    @property
    def moved_bytes(self) -> int:
        """Total size of the requests posted so far, in bytes."""
        return int(self._library.wireless_bytes(self._nic))

    def info(self) -> QueuePairInfo:
        return QueuePairInfo(0, "::", 0, 0, 0, 0, 0)

    def connect(self, remote: QueuePairInfo) -> None:
        return

    def completions(self, max_count: int) -> list[verbs.IbvWc]:
        return self._poller.poll(max_count)

    def take_event(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # consumed before: the event is still armed
        self._poller.request_event()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class WirelessNic:
    """A port without hardware; see ``SendingNic``."""

    number: int
    settings: RdmaSettings
    name: str = "wireless"
    max_message: int = 1 << 30

    def __post_init__(self) -> None:
        self.window = self.settings.window
        self.pairs: list[WirelessQueuePair] = []

    def queue_pair(self) -> WirelessQueuePair:
        self.pairs.append(WirelessQueuePair())
        return self.pairs[-1]


class Wireless:
    """A peer over ports without hardware, and its registered region; see ``RdmaPeerContext``."""

    def __init__(self, here: MemoryRegion, there: MemoryRegion) -> None:
        keys = RegionKeys([7] * CONNECTIONS, [0] * CONNECTIONS, True)
        self.local = AttachedRegions("this side")
        self.local.add(1, here, encode(keys))
        self.local_keys = RegionKeyTables(CONNECTIONS, lambda regions: [keys] * len(regions))
        self.progress = ProgressThread(lambda now: None, self._failed)
        self.nics = [WirelessNic(number, RdmaSettings()) for number in range(CONNECTIONS)]
        self._error: Exception | None = None
        ours, self._theirs = socket.socketpair()
        session = Session(ProvenSocket(ours, Seals(Seal(b""), Seal(b""))), reject_requests)
        session.regions.add(1, there, encode(keys))
        self.peer: Peer = RdmaPeer(
            self, session, [_connection(nic) for nic in self.nics], CONNECTIONS
        )

    @property
    def moved_bytes(self) -> int:
        """Total size of the requests posted to its NICs so far, in bytes."""
        return sum(pair.moved_bytes for nic in self.nics for pair in nic.pairs)

    def close(self) -> None:
        """Stop its thread and release its descriptors."""
        self.peer.close()
        self.progress.close()
        self._theirs.close()

    def _failed(self, error: Exception) -> None:
        assert isinstance(self.peer, RdmaPeer)
        self.peer.lost(PeerLost(f"progress failed: {error!r}"))


@contextmanager
def wireless(size: int) -> Iterator[tuple[Wireless, int, int]]:
    """Open a peer without hardware; yields it, and the local and remote address of ``size`` bytes.

    Raises:
        NativeUnavailable: there is no compiler.
    """
    with ExitStack() as stack:
        here, there = (anonymous(size) for _ in range(2))
        stack.callback(here.close)
        stack.callback(there.close)
        opened = Wireless(here.region, there.region)
        stack.callback(opened.close)
        yield opened, here.region.address, there.region.address


def posting_us(shape: TransferShape, rounds: int) -> float:
    """CPU microseconds of this process per span, for reads of a shape; the median of the rounds.

    Raises:
        NativeUnavailable: there is no compiler.
    """
    with wireless(shape.total_bytes) as (opened, here, there):
        spans = shape.spans(here, there)
        costs = []
        for _ in range(rounds):
            before = time.process_time()
            opened.peer.read(spans, timeout=SECONDS).wait()
            costs.append((time.process_time() - before) / len(spans) * 1e6)
        if opened.moved_bytes != rounds * shape.total_bytes:
            raise AssertionError(f"{opened.moved_bytes} bytes were posted")
    return float(np.median(costs))


def _connection(nic: WirelessNic) -> RdmaConnection:
    connection = RdmaConnection(nic.number, nic, nic.number)
    connection.connect(connection.open())
    return connection


def _library() -> ctypes.CDLL:
    library = native.compile_c(
        "bench_posting", Path(__file__).with_name("verbs_posting.c").read_text()
    )
    library.wireless_size.restype = ctypes.c_uint64
    library.wireless_bytes.restype = ctypes.c_uint64
    return library
