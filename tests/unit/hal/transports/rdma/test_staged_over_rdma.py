"""The ``staged`` transport over NICs, with a libibverbs that copies within this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from support import emulated_verbs
from support.host_device import DEVICE
from support.staged_over_rdma import ALLOCATOR, LOADER, StagedOverRdma

from mooncake_hal.errors import PeerLost
from mooncake_hal.native import find_compiler
from mooncake_hal.testing.transports import MIB, TransportConformance, raises
from mooncake_hal.testing.transports_staged import StagedBetweenKinds

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    library = emulated_verbs.install(monkeypatch)
    yield library
    for device in range(len(emulated_verbs.PORTS)):
        library.emulated_set_down(device, 0)


class TestStaged(StagedOverRdma, TransportConformance):
    """The conformance suite, and failover between NICs."""

    @pytest.mark.parametrize("how", ["read", "write"])
    def test_another_nic_takes_over(self, library: ctypes.CDLL, how: str) -> None:
        pair = self.pair(4 * MIB)
        wanted = pair.there.get() if how == "read" else pair.here.get()
        library.emulated_set_down(0, 1)
        getattr(self, how)(pair.peer, pair.whole(4 * MIB))
        assert (pair.here.get() == wanted).all()
        assert (pair.there.get() == wanted).all()

    def test_peer_is_lost_without_any_nic(self, library: ctypes.CDLL) -> None:
        pair = self.pair(MIB)
        for device in range(len(emulated_verbs.PORTS)):
            library.emulated_set_down(device, 1)
        with raises(PeerLost):
            self.read(pair.peer, pair.whole(MIB))


class TestBetweenKinds(StagedBetweenKinds):
    device = DEVICE
    loader, allocator = LOADER, ALLOCATOR
