"""The client side of shm if the peer's memory is inaccessible."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.frames import Seal, Seals
from mooncake_hal.session.listener import ProvenSocket
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session, reject_requests
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.shm.shm_copying import CopyThreads, NumpyCopier
from mooncake_hal.transports.shm.shm_peer import RemoteProcess, SharedRange, ShmPeer


@pytest.fixture
def workers() -> Iterator[CopyThreads]:
    made = CopyThreads(1, "copy", NumpyCopier())
    yield made
    made.close()


def test_transfer_that_cannot_start_leaves_no_state(workers: CopyThreads) -> None:
    local = AttachedRegions("this side")
    local.add(1, MemoryRegion(4096, 64), b"")
    ours, theirs = socket.socketpair()
    with theirs:
        seals = Seals(Seal(b"key"), Seal(b"key"))
        session = Session(ProvenSocket(ours, seals), reject_requests)
        session.regions.add(7, MemoryRegion(8192, 64), encode(SharedRange(False, 0)))
        remote = RemoteProcess(1, None, "the kernel forbids it")
        peer = ShmPeer(session, remote, local, workers)
        session.watch_regions(peer)
        pieces = [np.array(values, np.uint64) for values in ((4096, 4104), (8192, 8200), (8, 8))]
        with pytest.raises(TransportUnavailable, match="the kernel forbids it"):
            peer.write(Spans(*pieces), timeout=1.0)
        assert peer._running == set()
        peer.close()
