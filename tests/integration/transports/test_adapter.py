"""Adapters over engines that fail, stall, or answer under another engine's name."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.adapter_engine import World, transport_in

from mooncake_hal.errors import (
    PeerLost,
    RegionRevoked,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.testing.transports import Pair, TransportKit, one_span
from mooncake_hal.transport import TransferState

MIB = 1 << 20


class Kit(TransportKit):
    """Two endpoints whose engine behaves as scripted by the fake world."""

    loader = "support.adapter_engine:load"

    def __init__(self) -> None:
        self.setup_method()
        self.world = World()
        self.transport = transport_in(self.world)


@pytest.fixture
def kit() -> Iterator[Kit]:
    made = Kit()
    yield made
    made.world.may_continue.set()
    made.teardown_method()


@pytest.fixture
def pair(kit: Kit) -> Pair:
    return kit.pair()


def test_failed_slice_is_retried_with_new_agent(kit: Kit, pair: Pair) -> None:
    kit.world.num_failures, before = 2, kit.world.num_opened
    kit.read(pair.peer, pair.whole(MIB))
    assert (pair.here.get() == pair.there.get()).all()
    assert kit.world.num_opened == before + 2


def test_engine_that_always_fails_fails_the_transfer(kit: Kit, pair: Pair) -> None:
    kit.world.num_failures = 1000
    with pytest.raises(TransferError, match=r"failed 3 times in a row.*told to fail"):
        kit.read(pair.peer, pair.whole(MIB))
    assert kit.world.num_failures == 997
    kit.world.num_failures = 0
    kit.write(pair.peer, pair.whole(MIB))
    assert (pair.here.get() == pair.there.get()).all()


def test_stalled_transfer_can_be_cancelled(kit: Kit, pair: Pair) -> None:
    kit.world.may_continue.clear()
    before = pair.here.get()
    transfer = pair.peer.read(pair.whole(MIB), timeout=60)
    assert kit.world.stands_still.wait(10)
    assert transfer.poll() is TransferState.PENDING
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.wait()
    assert len(kit.world.agents) == 2, "the stalled agent is not closed"
    kit.world.may_continue.set()
    assert (pair.here.get() == before).all()
    kit.read(pair.peer, pair.whole(MIB))
    assert (pair.here.get() == pair.there.get()).all()


def test_deadline_expires_without_a_waiter(kit: Kit, pair: Pair) -> None:
    kit.world.may_continue.clear()
    transfer = pair.peer.write(pair.whole(64), timeout=0.01)
    ended = threading.Event()
    while transfer.poll() is TransferState.PENDING:
        ended.wait(0.001)
    with pytest.raises(TransferTimeout):
        transfer.wait()


def test_queued_transfer_is_cancelled_at_once(kit: Kit, pair: Pair) -> None:
    kit.world.may_continue.clear()
    first = pair.peer.read(pair.whole(MIB), timeout=60)
    second = pair.peer.read(pair.whole(MIB), timeout=60)
    assert kit.world.stands_still.wait(10)
    second.cancel()
    assert second.poll() is TransferState.FAILED
    assert first.poll() is TransferState.PENDING
    kit.world.may_continue.set()
    first.wait()


def test_revoking_local_region_ends_its_transfers(kit: Kit, pair: Pair) -> None:
    kit.world.may_continue.clear()
    transfer = pair.peer.read(pair.whole(MIB), timeout=60)
    assert kit.world.stands_still.wait(10)
    before = pair.here.get()
    pair.near.revoke(pair.key_here)
    kit.world.may_continue.set()
    with pytest.raises(RegionRevoked):
        transfer.wait()
    assert (pair.here.get() == before).all()


def test_lost_peer_ends_stalled_transfers(kit: Kit, pair: Pair) -> None:
    kit.world.may_continue.clear()
    transfers = [pair.peer.read(pair.whole(MIB), timeout=60) for _ in range(3)]
    assert kit.world.stands_still.wait(10)
    pair.far.close()
    for transfer in transfers:
        with pytest.raises(PeerLost):
            transfer.wait()


def test_other_engine_at_peers_address_is_detected(kit: Kit) -> None:
    near, far = kit.open(), kit.open()
    kit.world.is_misled = True
    with pytest.raises(TransportUnavailable, match="another engine replies"):
        near.connect(far.address, timeout=10)
    assert len(kit.world.agents) == 2, "the refused connection left an agent behind"


def test_unreachable_engine_fails_to_connect(kit: Kit) -> None:
    near, far = kit.open(), kit.open()
    kit.world.num_failures = 1
    with pytest.raises(TransportUnavailable, match="the peer's engine is unreachable"):
        near.connect(far.address, timeout=10)


def test_region_is_registered_with_agent_once(kit: Kit, pair: Pair) -> None:
    late = kit.buffer(MIB)
    pair.far.register(late.region)
    for _ in range(2):
        kit.read(pair.peer, one_span(pair.here.region.address, late.region.address, MIB))
        kit.read(pair.peer, pair.whole(MIB))
    assert np.array_equal(pair.here.get(), pair.there.get())
    assert kit.world.num_opened == 3
