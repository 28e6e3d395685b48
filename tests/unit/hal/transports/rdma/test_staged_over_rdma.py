"""The ``staged`` transport over NICs, with a libibverbs that copies within this process."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from support import emulated_verbs
from support.host_device import DEVICE
from support.staged_over_rdma import ALLOCATOR, LOADER, StagedOverRdma

from mooncake_hal.errors import PeerLost, TransportUnavailable
from mooncake_hal.native import find_compiler
from mooncake_hal.testing.transports import MIB, TransportConformance, one_span, raises
from mooncake_hal.testing.transports_staged import StagedBetweenKinds
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma.rdma_endpoint import RdmaDataPath

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    library = emulated_verbs.install(monkeypatch)
    yield library
    for device in range(len(emulated_verbs.PORTS)):
        library.emulated_set_down(device, 0)


class TestStaged(StagedOverRdma, TransportConformance):
    """The conformance suite, and failover between NICs."""

    moves_4_gib = False

    @pytest.mark.parametrize("how", ["read", "write"])
    def test_another_nic_takes_over(self, library: ctypes.CDLL, how: str) -> None:
        pair = self.pair(4 * MIB)
        wanted = pair.there.get() if how == "read" else pair.here.get()
        library.emulated_set_down(0, 1)
        getattr(self, how)(pair.peer, pair.whole(4 * MIB))
        assert (pair.here.get() == wanted).all()
        assert (pair.there.get() == wanted).all()

    @pytest.mark.parametrize("failing", [0, 1], ids=["client", "server"])
    def test_staging_buffer_that_rdma_cannot_register_costs_only_its_peer(
        self, failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The limit of pinned memory may be reached, and other peers use rdma."""
        caplog.set_level(logging.INFO, "mooncake_hal.negotiation")
        here, there = self.buffer(MIB), self.buffer(MIB)
        near, far = self.open(), self.open()
        near.register(here.region)
        far.register(there.region)
        num_registered, attach = count(), RdmaDataPath.attach

        def fail_once(path: RdmaDataPath, key: int, region: MemoryRegion) -> bytes:
            if next(num_registered) == failing + 2:  # each of the two has one for the first peer
                raise TransportUnavailable("rdma", "no memory can be pinned")
            return attach(path, key, region)

        monkeypatch.setattr(RdmaDataPath, "attach", fail_once)
        peers = [near.connect(far.address, timeout=self.timeout) for _ in range(3)]
        used = re.findall(r"transport: (\w+) is the best", caplog.text)
        assert used == ["rdma", "tcp", "rdma"]
        for peer in peers:
            there.put(self.rng.integers(0, 256, MIB, np.uint8))
            self.read(peer, one_span(here.region.address, there.region.address, MIB))
            assert (here.get() == there.get()).all()

    def test_peer_is_lost_without_any_nic(self, library: ctypes.CDLL) -> None:
        pair = self.pair(MIB)
        for device in range(len(emulated_verbs.PORTS)):
            library.emulated_set_down(device, 1)
        with raises(PeerLost):
            self.read(pair.peer, pair.whole(MIB))


class TestBetweenKinds(StagedBetweenKinds):
    device = DEVICE
    loader, allocator = LOADER, ALLOCATOR
