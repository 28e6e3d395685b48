"""A NIC that fails during a transfer, on the soft-RoCE devices of the VM."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mooncake_hal.errors import PeerLost
from mooncake_hal.testing.transports import MIB, Pair, TransportKit, one_span, raises
from mooncake_hal.transports.rdma import rdma_connection
from mooncake_hal.transports.rdma.rdma_plugin import active_ports

NETWORK_DEVICES = {"rxe0:1": "d0", "rxe1:1": "d1"}
"""Port by network device, as ci/rdma-vm creates them; taking one down affects nothing else."""

NBYTES = 32 * MIB

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not set(NETWORK_DEVICES) <= set(active_ports()),
        reason="takes network devices down, which is done in the VM only",
    ),
]


@contextmanager
def down(*ports: str) -> Iterator[None]:
    """Take ports down for the duration of a block."""
    devices = [NETWORK_DEVICES[port] for port in ports]
    for device in devices:
        subprocess.run(["ip", "link", "set", device, "down"], check=True)
    try:
        yield
    finally:
        for device in devices:
            subprocess.run(["ip", "link", "set", device, "up"], check=True)


class TestFailover(TransportKit):
    """One endpoint reads from another one; both have two NICs."""

    loader = "mooncake_hal.transports.rdma.rdma_plugin:load"
    timeout = 120.0

    @pytest.mark.parametrize("dead", sorted(NETWORK_DEVICES))
    def test_the_other_nic_takes_over(self, dead: str, caplog: pytest.LogCaptureFixture) -> None:
        pair = self.pair(NBYTES)
        transfer = pair.peer.read(pair.whole(NBYTES), timeout=self.timeout)
        with down(dead):
            transfer.wait()
            assert (pair.here.get() == pair.there.get()).all()
            self.read_until(pair, lambda: f"on {dead}" in caplog.text)
        self.check_reads(pair)

    def test_peer_is_lost_without_any_nic(self) -> None:
        pair = self.pair(NBYTES)
        with down(*NETWORK_DEVICES), raises(PeerLost):
            self.write(pair.peer, pair.whole(NBYTES))
        peer = pair.near.connect(pair.far.address, timeout=self.timeout)
        self.write(peer, pair.whole(MIB))
        assert (pair.here.get()[:MIB] == pair.there.get()[:MIB]).all()

    def test_recovered_nic_is_used_again(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(rdma_connection, "COOLDOWN_SECONDS", 0.1)
        pair = self.pair(NBYTES)
        with down("rxe0:1"):
            self.read_until(pair, lambda: "on rxe0:1" in caplog.text)
        before = packets_sent("rxe0")
        self.read_until(pair, lambda: packets_sent("rxe0") - before > 100)

    def read_until(self, pair: Pair, seen: Callable[[], bool]) -> None:
        """Read, and compare what was read, until the condition holds.

        Raises:
            AssertionError: it never holds within the time limit.
        """
        deadline = time.monotonic() + self.timeout
        while not seen():
            assert time.monotonic() < deadline, "the condition did not hold in time"
            self.check_reads(pair)

    def check_reads(self, pair: Pair) -> None:
        """Read new bytes in more transfers than there are connections, so that each gets one."""
        pair.there.put(self.rng.integers(0, 256, NBYTES, np.uint8))
        here, there = pair.here.region.address, pair.there.region.address
        for at in range(0, 4 * MIB, MIB):
            self.read(pair.peer, one_span(here + at, there + at, MIB))
        assert (pair.here.get()[: 4 * MIB] == pair.there.get()[: 4 * MIB]).all()


def packets_sent(device: str) -> int:
    """Packets that a soft-RoCE device has sent since its creation."""
    counter = Path("/sys/class/infiniband") / device / "ports/1/hw_counters/sent_pkts"
    return int(counter.read_text())
