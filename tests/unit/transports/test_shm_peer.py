"""The client's side of shm where the peer's memory can't be reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.regions import RegionTable
from mooncake_hal.transports.shm import control
from mooncake_hal.transports.shm.copier import NumpyCopier
from mooncake_hal.transports.shm.copying import Workers
from mooncake_hal.transports.shm.peer import Remote, ShmPeer


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(1, "copy", NumpyCopier())
    yield made
    made.close()


def test_a_transfer_that_can_not_begin_leaves_nothing(workers: Workers) -> None:
    local = RegionTable("this side")
    local.add(1, MemoryRegion(4096, 64))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = ShmPeer(ours, Remote(1, None, "the kernel forbids it"), local, workers)
        peer.offered(control.Offer(7, 8192, 64, mappable=False, fd_offset=0), [])
        pieces = [np.array(values, np.uint64) for values in ((4096, 4104), (8192, 8200), (8, 8))]
        with pytest.raises(TransportUnavailable, match="the kernel forbids it"):
            peer.write(Spans(*pieces), timeout=1.0)
        assert peer._running == set()
        peer.close()
