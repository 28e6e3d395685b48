"""What posting to an RDMA NIC costs the CPU, measured without a wire.

The rdma transport's own peer, windows and work requests post to a queue pair behind which there
is no NIC but a C function: it takes requests as the driver of real hardware does, and completes
them at once. So everything is counted that this process does per transfer: looking the spans up,
cutting and sharing them out, building and posting the requests, taking events and completions.
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
from typing import NamedTuple

import numpy as np

from mooncake_hal import native
from mooncake_hal.bench.measure import Shape
from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.testing.transports_buffers import anonymous
from mooncake_hal.transport import MemoryRegion, Peer
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import encode
from mooncake_hal.transports.rdma.compat import PostBatch, QueuePairStruct, array_poster
from mooncake_hal.transports.rdma.facts import LaneFacts, RegionKeys
from mooncake_hal.transports.rdma.keys import KeyTables
from mooncake_hal.transports.rdma.lane import WC_SUCCESS, Lane
from mooncake_hal.transports.rdma.peer import RdmaPeer
from mooncake_hal.transports.rdma.progress import Progress
from mooncake_hal.transports.rdma.settings import RdmaSettings

SECONDS = 30.0
LANES = 2
MAX_COMPLETIONS = 64


class Done(NamedTuple):
    """A completion, as pyverbs has them."""

    wr_id: int
    status: int = WC_SUCCESS


class WirelessPair:
    """A queue pair whose requests are done when they are posted; see ``SendingPair``."""

    inline_bytes = 28

    def __init__(self) -> None:
        self._library = _library()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._nic = ctypes.create_string_buffer(self._library.wireless_size())
        self._library.wireless_open(self._nic, self.fd)
        self._operations = (ctypes.c_void_p * 32)()
        post_send = ctypes.cast(self._library.wireless_post_send, ctypes.c_void_p).value
        self._operations[26] = post_send  # after the device, the 26th operation
        self._struct = QueuePairStruct(
            context=ctypes.addressof(self._operations), qp_context=ctypes.addressof(self._nic)
        )
        self._done = (ctypes.c_uint64 * MAX_COMPLETIONS)()
        self._library.wireless_arm(self._nic)

    @property
    def moved_bytes(self) -> int:
        """How many bytes it was asked to move so far."""
        return int(self._library.wireless_bytes(self._nic))

    def facts(self) -> LaneFacts:
        """See ``SendingPair``."""
        return LaneFacts(0, "::", 0, 0, 0, 0, 0)

    def connect(self, remote: LaneFacts) -> None:
        """See ``SendingPair``."""

    def poster(self) -> PostBatch:
        """See ``SendingPair``."""
        return array_poster(ctypes.addressof(self._struct))

    def completions(self, most: int) -> list[Done]:
        """See ``SendingPair``."""
        count = self._library.wireless_poll(self._nic, self._done, min(most, MAX_COMPLETIONS))
        return [Done(number) for number in self._done[:count]]

    def take_event(self) -> None:
        """See ``SendingPair``."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # taken before: the event is armed still
        self._library.wireless_arm(self._nic)

    def close(self) -> None:
        """See ``SendingPair``."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class WirelessRail:
    """A port without a wire; see ``SendingRail``."""

    number: int
    settings: RdmaSettings
    name: str = "wireless"
    max_message: int = 1 << 30

    def __post_init__(self) -> None:
        self.window = self.settings.window
        self.pairs: list[WirelessPair] = []

    def queue_pair(self) -> WirelessPair:
        """See ``SendingRail``."""
        self.pairs.append(WirelessPair())
        return self.pairs[-1]


class Wireless:
    """A peer at the end of no wire, and the region that it registered; see ``Neighbourhood``."""

    def __init__(self, here: MemoryRegion, there: MemoryRegion) -> None:
        keys = RegionKeys([7] * LANES, [0] * LANES, True)
        self.local = AttachedRegions("this side")
        self.local.add(1, here, encode(keys))
        self.local_keys = KeyTables(LANES, lambda regions: [keys] * len(regions))
        self.progress = Progress(lambda now: None, self._failed)
        self.rails = [WirelessRail(number, RdmaSettings()) for number in range(LANES)]
        self._error: Exception | None = None
        ours, self._theirs = socket.socketpair()
        session = Session(ours, _answer_nothing)
        session.regions.add(1, there, encode(keys))
        self.peer: Peer = RdmaPeer(self, session, [_lane(rail) for rail in self.rails], LANES)

    @property
    def moved_bytes(self) -> int:
        """How many bytes its NICs were asked to move so far."""
        return sum(pair.moved_bytes for rail in self.rails for pair in rail.pairs)

    def close(self) -> None:
        """End its thread and free its descriptors."""
        self.peer.close()
        self.progress.close()
        self._theirs.close()

    def _failed(self, error: Exception) -> None:
        assert isinstance(self.peer, RdmaPeer)
        self.peer.lost(PeerLost(f"progress failed: {error!r}"))


@contextmanager
def wireless(size: int) -> Iterator[tuple[Wireless, int, int]]:
    """Open a peer without a wire; yields it, and where ``size`` bytes lie here and there.

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


def posting_us(shape: Shape, rounds: int) -> float:
    """CPU microseconds of this process per span, for reads of that shape; the median of rounds.

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


def _lane(rail: WirelessRail) -> Lane:
    lane = Lane(rail.number, rail, rail.number)
    lane.connect(lane.open())
    return lane


def _answer_nothing(session: Session, payload: bytes) -> bytes:
    raise TransferError("nobody is at the other end")


def _library() -> ctypes.CDLL:
    library = native.compile_c("bench_posting", Path(__file__).with_name("posting.c").read_text())
    library.wireless_size.restype = ctypes.c_uint64
    library.wireless_bytes.restype = ctypes.c_uint64
    return library
