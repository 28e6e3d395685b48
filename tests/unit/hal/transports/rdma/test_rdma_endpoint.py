"""The rdma transport's conformance and failover between NICs, over emulated verbs."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator

import numpy as np
import pytest
from support import emulated_verbs
from support.rdma_fuzz import RdmaFuzz

from mooncake_hal.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from mooncake_hal.native import find_compiler
from mooncake_hal.testing.transports import MIB, Pair, TransportConformance, TransportKit, raises
from mooncake_hal.transports.rdma import rdma_connection, rdma_peer

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

LOADER = "mooncake_hal.transports.rdma.rdma_plugin:load"


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    library = emulated_verbs.install(monkeypatch)
    yield library
    for device in range(len(emulated_verbs.PORTS)):
        library.emulated_set_down(device, 0)
    library.emulated_set_stuck(0)


class TestRdma(TransportConformance):
    """The conformance suite between two endpoints of one process."""

    loader = LOADER
    moves_4_gib = False


class TestFuzz(RdmaFuzz):
    """Malformed messages."""


class TestStuck(TransportKit):
    """Requests that never complete hold their memory until their queue pair is destroyed."""

    loader = LOADER

    @pytest.fixture(autouse=True)
    def short_stuck_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rdma_peer, "STUCK_SECONDS", 0.05)

    def test_stuck_transfer_times_out(
        self, library: ctypes.CDLL, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = self.pair(4 * MIB)
        library.emulated_set_stuck(1)
        with raises(TransferTimeout):
            pair.peer.read(pair.whole(4 * MIB), timeout=0.1).wait()
        assert "does not drain; it gets a new queue pair" in caplog.text
        self.check_works_again(library, pair)

    def test_stuck_transfer_can_be_cancelled(self, library: ctypes.CDLL) -> None:
        pair = self.pair(4 * MIB)
        library.emulated_set_stuck(1)
        transfer = pair.peer.read(pair.whole(4 * MIB), timeout=self.timeout)
        transfer.cancel()
        with raises(TransferCancelled):
            transfer.wait()
        self.check_works_again(library, pair)

    def test_closing_the_peer_fails_a_stuck_transfer(self, library: ctypes.CDLL) -> None:
        pair = self.pair(4 * MIB)
        library.emulated_set_stuck(1)
        transfer = pair.peer.read(pair.whole(4 * MIB), timeout=self.timeout)
        pair.peer.close()
        with raises(PeerLost):
            transfer.wait()

    def check_works_again(self, library: ctypes.CDLL, pair: Pair) -> None:
        """Check that the same peer works over new queue pairs."""
        library.emulated_set_stuck(0)
        pair.there.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        self.read(pair.peer, pair.whole(4 * MIB))
        assert (pair.here.get() == pair.there.get()).all()


class TestFailover(TransportKit):
    """One endpoint reads from another one; both have two NICs."""

    loader = LOADER

    @pytest.mark.parametrize("dead", [0, 1])
    def test_other_nic_takes_over(
        self, library: ctypes.CDLL, dead: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = self.pair(4 * MIB)
        library.emulated_set_down(dead, 1)
        self.read(pair.peer, pair.whole(4 * MIB))
        assert (pair.here.get() == pair.there.get()).all()
        assert f"on {emulated_verbs.PORTS[dead]}: work completion status 12" in caplog.text

    def test_peer_is_lost_without_any_nic(self, library: ctypes.CDLL) -> None:
        pair = self.pair(MIB)
        for device in (0, 1):
            library.emulated_set_down(device, 1)
        with raises(PeerLost):
            self.write(pair.peer, pair.whole(MIB))

    def test_recovered_nic_is_used_again(
        self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rdma_connection, "COOLDOWN_SECONDS", 0.0)
        pair = self.pair(4 * MIB)
        library.emulated_set_down(0, 1)
        self.read(pair.peer, pair.whole(4 * MIB))
        library.emulated_set_down(0, 0)
        self.read(pair.peer, pair.whole(4 * MIB))  # requests a new queue pair
        library.emulated_set_down(1, 1)
        pair.there.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        self.read(pair.peer, pair.whole(4 * MIB))
        assert (pair.here.get() == pair.there.get()).all()

    def test_failed_deregistration_on_one_nic_continues_on_the_others(
        self, library: ctypes.CDLL
    ) -> None:
        near, here = self.open(), self.buffer(MIB)
        before = library.emulated_objects()
        key = near.register(here.region)
        library.emulated_fail(b"ibv_dereg_mr", errno.EBUSY)
        with raises(TransferError):
            near.revoke(key)
        assert library.emulated_objects() == before + 1

    def test_close_destroys_all_verbs_objects(self, library: ctypes.CDLL) -> None:
        before = library.emulated_objects()
        pair = self.pair(MIB)
        self.read(pair.peer, pair.whole(MIB))
        assert library.emulated_objects() > before
        pair.far.close()
        pair.near.close()
        assert library.emulated_objects() == before
