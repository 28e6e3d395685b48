"""The fault injector, over shm within this process: each fault looks as it would to a caller."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_hal.errors import (
    PeerLost,
    RegionUnknown,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mooncake_hal.testing.transports import Pair, TransportConformance, TransportKit, one_span
from mooncake_hal.testing.transports_buffers import random_pieces
from mooncake_hal.testing.transports_faults import Fault, Faults, FaultyTransport
from mooncake_hal.transport import TransferState
from mooncake_hal.transports.shm.shm_transport import load as load_shm

KIB = 1024
SIZE = 256 * KIB


def load_faultless() -> FaultyTransport:
    """Return the decorator with nothing to inject."""
    return FaultyTransport(load_shm(), Faults())


class TestTheDecoratorItself(TransportConformance):
    """Without faults the decorator conforms like the transport that it wraps."""

    loader = "mooncake_hal.transports.shm.shm_transport:load"
    moves_4_gib = False

    def setup_method(self) -> None:
        super().setup_method()
        self.transport = load_faultless()


class Kit(TransportKit):
    loader = "mooncake_hal.transports.shm.shm_transport:load"


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def pair(faults: Faults) -> Iterator[Pair]:
    kit = Kit()
    kit.setup_method()
    kit.transport = FaultyTransport(kit.transport, faults)
    yield kit.pair(SIZE)
    kit.teardown_method()


def read(pair: Pair, timeout: float = 10.0) -> None:
    pair.peer.read(pair.whole(SIZE), timeout=timeout).wait()


def assert_arrived(pair: Pair) -> None:
    assert (pair.here.get() == pair.there.get()).all()


def test_planned_faults_are_used_in_order(pair: Pair, faults: Faults) -> None:
    faults.plan += [Fault(fail=PeerLost("injected: gone")), Fault()]
    before = pair.here.get()
    with pytest.raises(PeerLost, match="injected: gone"):
        read(pair)
    assert (pair.here.get() == before).all()
    read(pair)
    read(pair)
    assert_arrived(pair)


def test_dropped_transfer_times_out(pair: Pair, faults: Faults) -> None:
    faults.plan.append(Fault(drop=True))
    before = pair.here.get()
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"not done within 0\.05 s"):
        read(pair, timeout=0.05)
    assert 0.04 < time.monotonic() - started < 5
    assert (pair.here.get() == before).all()


def test_dropped_transfer_can_be_cancelled(pair: Pair, faults: Faults) -> None:
    faults.plan.append(Fault(drop=True))
    transfer = pair.peer.read(pair.whole(SIZE), timeout=60)
    assert transfer.poll() is TransferState.PENDING
    transfer.cancel()
    assert transfer.poll() is TransferState.FAILED
    with pytest.raises(TransferCancelled):
        transfer.wait()


def test_delay_postpones_completion(pair: Pair, faults: Faults) -> None:
    faults.plan.append(Fault(delay_s=0.05))
    started = time.monotonic()
    read(pair)
    assert time.monotonic() - started >= 0.05
    assert_arrived(pair)


def test_throttling_limits_the_rate(pair: Pair, faults: Faults) -> None:
    faults.otherwise = Fault(bytes_per_s=SIZE * 10)
    started = time.monotonic()
    read(pair)
    assert 0.09 < time.monotonic() - started < 5
    assert_arrived(pair)


def test_throttling_beyond_the_deadline_times_out(pair: Pair, faults: Faults) -> None:
    faults.otherwise = Fault(bytes_per_s=SIZE)
    with pytest.raises(TransferTimeout):
        read(pair, timeout=0.1)


def test_duplicates_and_reordering_still_arrive(pair: Pair, faults: Faults) -> None:
    pieces = random_pieces(np.random.default_rng(1), np.full(50, KIB, np.int64), SIZE)
    expected = pieces.after_read(pair.here.get(), pair.there.get())
    faults.otherwise = Fault(duplicate=True, reorder=3)
    pair.peer.read(pair.spans(pieces), timeout=10).wait()
    assert (pair.here.get() == expected).all()


def test_truncation_moves_a_share_and_fails(pair: Pair, faults: Faults) -> None:
    pieces = random_pieces(np.random.default_rng(1), np.full(10, KIB, np.int64), SIZE)
    expected = pieces.after_read(pair.here.get(), pair.there.get())
    before = pair.here.get()
    faults.plan.append(Fault(truncate=0.5))
    with pytest.raises(PeerLost, match="broken off after 50% of the pieces"):
        pair.peer.read(pair.spans(pieces), timeout=10).wait()
    moved = [
        bool((pair.here.get()[at : at + KIB] == expected[at : at + KIB]).all())
        for at in pieces.near.tolist()
    ]
    assert moved == [True] * 5 + [False] * 5
    assert (before[pieces.near[9] :][:KIB] == pair.here.get()[pieces.near[9] :][:KIB]).all()


def test_errors_of_the_wrapped_transport_are_raised(pair: Pair, faults: Faults) -> None:
    faults.otherwise = Fault(duplicate=True)
    with pytest.raises(RegionUnknown):
        pair.peer.read(one_span(pair.here.region.address, 64, 64), timeout=10).wait()
    with pytest.raises(ValueError, match="zero"):
        pair.peer.read(one_span(pair.here.region.address, 64, 0), timeout=10)


def test_closing_the_peer_fails_transfers_in_flight(pair: Pair, faults: Faults) -> None:
    faults.plan.append(Fault(drop=True))
    transfer = pair.peer.read(pair.whole(SIZE), timeout=60)
    pair.peer.close()
    with pytest.raises(PeerLost, match="this side closed"):
        transfer.wait()


def test_connect_error_is_injected(pair: Pair, faults: Faults) -> None:
    faults.on_connect = TransferError("injected: no route")
    with pytest.raises(TransferError, match="injected: no route"):
        pair.near.connect(pair.far.address, timeout=10)
    pair.near.connect(pair.far.address, timeout=10).close()
