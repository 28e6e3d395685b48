"""The conformance suite of transports.

A plugin's tests subclass ``TransportConformance`` and name a loader; pytest runs the methods::

    class TestMyTransport(TransportConformance):
        loader = "my_package.transport:load"

``TransportProcessConformance`` adds the cases that need a second process: kills, restarts, leaks.
Every case moves random content and compares whole buffers, so that all bytes around a destination
act as guard bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from mooncake_hal.errors import (
    AccessDenied,
    HalError,
    OutOfBounds,
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mooncake_hal.testing.transports_buffers import ScatteredPieces, random_pieces
from mooncake_hal.testing.transports_kit import (
    KIB,
    MIB,
    Pair,
    TransportKit,
    assert_same,
    one_span,
    raises,
    require_message,
    stripes,
)
from mooncake_hal.testing.transports_sizes import SizesSuite
from mooncake_hal.transport import MemoryRegion, Spans, Transfer, TransferState


class TransportConformance(SizesSuite):
    """The cases with two endpoints of one process."""

    def test_one_range(self) -> None:
        pair = self.pair()
        start = np.array([1000], np.int64)
        self.check_moves(pair, ScatteredPieces(start, start + 77, np.array([300 * KIB], np.int64)))

    def test_single_bytes_and_odd_sizes(self) -> None:
        pair = self.pair()
        sizes = np.array([1, 2, 3, 7, 63, 64, 65, 4095, 4096, 4097, 65537], np.int64)
        self.check_moves(pair, random_pieces(self.rng, sizes, MIB))

    def test_blocks_in_any_order(self) -> None:
        pair = self.pair(8 * MIB)
        sizes = np.full(100, 64 * KIB, np.int64)
        self.check_moves(pair, random_pieces(self.rng, sizes, 8 * MIB))

    def test_stripes_of_wider_blocks(self) -> None:
        """One rank's heads are packed on one side, and a stripe per token of the wider blocks on
        the other side."""
        pair = self.pair(2 * MIB)
        dense, striped = stripes(num_tokens=4096, nbytes=256)
        sizes = np.full(len(dense), 256, np.int64)
        self.check_moves(pair, ScatteredPieces(dense, striped, sizes))
        self.check_moves(pair, ScatteredPieces(striped, dense, sizes))

    def test_a_large_transfer(self) -> None:
        pair = self.pair(self.large)
        sizes = self.rng.integers(1, self.large // 24, 40).astype(np.int64)
        self.check_moves(pair, random_pieces(self.rng, sizes, self.large))

    def test_no_spans_is_done(self) -> None:
        pair = self.pair()
        before = pair.here.get()
        empty = np.empty(0, np.uint64)
        transfer = pair.peer.read(Spans(empty, empty, empty), timeout=self.timeout)
        transfer.wait()
        assert transfer.poll() is TransferState.DONE
        assert_same(pair.here.get(), before, "the near buffer after moving nothing")

    def test_spans_over_several_regions(self) -> None:
        pair = self.pair()
        extra_here, extra_there = self.buffer(MIB), self.buffer(MIB)
        pair.near.register(extra_here.region)
        pair.far.register(extra_there.region)
        addresses = [
            (pair.here.region.address + 5, extra_there.region.address, 100 * KIB),
            (extra_here.region.address, pair.there.region.address + 9, 100 * KIB),
            (extra_here.region.address + 200 * KIB, extra_there.region.address + MIB - 7, 7),
        ]
        local, remote, nbytes = (
            np.array(column, np.uint64) for column in zip(*addresses, strict=True)
        )
        self.read(pair.peer, Spans(local, remote, nbytes))
        assert (pair.here.get()[5 : 5 + 100 * KIB] == extra_there.get()[: 100 * KIB]).all()
        assert (extra_here.get()[: 100 * KIB] == pair.there.get()[9 : 9 + 100 * KIB]).all()
        assert (extra_here.get()[200 * KIB :][:7] == extra_there.get()[-7:]).all()

    def test_a_region_registered_after_connecting(self) -> None:
        pair = self.pair()
        late = self.buffer(MIB)
        pair.far.register(late.region)
        self.read(pair.peer, one_span(pair.here.region.address, late.region.address, MIB))
        assert_same(pair.here.get(), late.get(), "what was read from the late region")

    def test_both_directions(self) -> None:
        pair = self.pair()
        back = pair.far.connect(pair.near.address, timeout=self.timeout)
        half = MIB // 2
        here, there = pair.here.region.address, pair.there.region.address
        first = pair.peer.read(one_span(here, there, half), timeout=self.timeout)
        second = back.read(one_span(there + half, here + half, half), timeout=self.timeout)
        first.wait()
        second.wait()
        assert_same(pair.here.get(), pair.there.get(), "what each side read from the other")

    def test_many_transfers_in_flight(self) -> None:
        pair = self.pair(4 * MIB)
        pieces = random_pieces(self.rng, np.full(32, 96 * KIB, np.int64), 4 * MIB)
        expected = pieces.after_read(pair.here.get(), pair.there.get())
        transfers = [
            pair.peer.read(pair.spans(_only(pieces, index)), timeout=self.timeout)
            for index in range(32)
        ]
        for transfer in reversed(transfers):
            transfer.wait()
        assert {transfer.poll() for transfer in transfers} == {TransferState.DONE}
        assert_same(pair.here.get(), expected, "the near buffer after 32 transfers")

    def test_one_peer_from_many_threads(self) -> None:
        pair = self.pair(4 * MIB)
        pieces = random_pieces(self.rng, np.full(64, 32 * KIB, np.int64), 4 * MIB)
        expected = pieces.after_read(pair.here.get(), pair.there.get())
        with ThreadPoolExecutor(4) as pool:
            moves = [
                pool.submit(self.read, pair.peer, pair.spans(_only(pieces, index)))
                for index in range(64)
            ]
            for move in moves:
                move.result(self.timeout)
        assert_same(pair.here.get(), expected, "the near buffer after 64 threaded reads")

    def test_poll_reaches_done_without_wait(self) -> None:
        """All bytes have arrived when ``poll`` first says so."""
        nbytes = 8 * MIB
        pair = self.pair(nbytes)
        transfer = pair.peer.read(pair.whole(nbytes), timeout=self.timeout)
        deadline = time.monotonic() + self.timeout
        while (state := transfer.poll()) is TransferState.PENDING:
            assert time.monotonic() < deadline, "the transfer did not end in time"
            time.sleep(0)
        after = pair.here.get()
        assert state is TransferState.DONE
        assert_same(after, pair.there.get(), "the near buffer when poll() says DONE")
        transfer.wait()
        transfer.cancel()
        assert transfer.poll() is TransferState.DONE

    def test_cancel_drains(self) -> None:
        pair = self.pair(self.large)
        transfer = pair.peer.read(pair.whole(self.large), timeout=self.timeout)
        transfer.cancel()
        after = pair.here.get()
        if transfer.poll() is TransferState.FAILED:
            with raises(TransferCancelled):
                transfer.wait()
        pair.there.put(self.rng.integers(0, 256, self.large, np.uint8))
        time.sleep(0.05)  # bytes that a cancelled transfer still moved would arrive now
        assert_same(pair.here.get(), after, "the near buffer after a cancelled read")
        self.read(pair.peer, pair.whole(MIB))
        assert_same(pair.here.get()[:MIB], pair.there.get()[:MIB], "a read after a cancelled one")

    def test_a_deadline_drains(self) -> None:
        pair = self.pair(self.large)
        transfer = pair.peer.read(pair.whole(self.large), timeout=1e-4)
        try:
            transfer.wait()
        except TransferTimeout:
            assert transfer.poll() is TransferState.FAILED
        after = pair.here.get()
        pair.there.put(self.rng.integers(0, 256, self.large, np.uint8))
        time.sleep(0.05)  # bytes that a timed-out transfer still moved would arrive now
        assert_same(pair.here.get(), after, "the near buffer after the deadline")
        self.read(pair.peer, pair.whole(MIB))
        assert_same(pair.here.get()[:MIB], pair.there.get()[:MIB], "a read after a timed-out one")

    def test_a_failed_write_moves_no_more_bytes(self) -> None:
        """With ``stops_writes_on_failure``, no more bytes arrive after a failed write."""
        pair = self.pair(self.large)
        transfer = pair.peer.write(pair.whole(self.large), timeout=self.timeout)
        transfer.cancel()
        if self.transport.stops_writes_on_failure:
            fresh = self.rng.integers(0, 256, self.large, np.uint8)
            pair.there.put(fresh)
            time.sleep(0.05)  # bytes of the cancelled write that were left would arrive now
            assert_same(pair.there.get(), fresh, "the far buffer after a cancelled write")

    def test_a_local_address_that_is_not_registered(self) -> None:
        pair = self.pair()
        unregistered = self.buffer(MIB)
        before = unregistered.get()
        spans = one_span(unregistered.region.address, pair.there.region.address, 64)
        with raises(RegionUnknown):
            pair.peer.read(spans, timeout=self.timeout)
        with raises(RegionUnknown):
            pair.peer.write(spans, timeout=self.timeout)
        assert_same(unregistered.get(), before, "memory that was never registered")

    def test_a_local_span_that_leaves_its_region(self) -> None:
        pair = self.pair()
        end = pair.here.region.address + MIB
        with raises(OutOfBounds):
            pair.peer.read(one_span(end - 8, pair.there.region.address, 9), timeout=self.timeout)

    def test_a_remote_address_that_is_not_registered(self) -> None:
        pair = self.pair()
        unregistered = self.buffer(MIB)
        before = unregistered.get()
        for remote in (unregistered.region.address, 0, 2**64 - 64):
            with raises(RegionUnknown):
                self.write(pair.peer, one_span(pair.here.region.address, remote, 64))
            with raises(RegionUnknown):
                self.read(pair.peer, one_span(pair.here.region.address, remote, 64))
        assert_same(unregistered.get(), before, "memory that was never registered")
        self.check_moves(pair, random_pieces(self.rng, np.full(4, KIB, np.int64), MIB))

    def test_a_remote_span_that_leaves_its_region(self) -> None:
        pair = self.pair()
        here, end = pair.here.region.address, pair.there.region.address + MIB
        with raises(OutOfBounds):
            self.read(pair.peer, one_span(here, end - 8, 9))
        with raises(OutOfBounds):
            self.write(pair.peer, one_span(here, end - 8, 9))
        self.check_moves(pair, random_pieces(self.rng, np.full(4, KIB, np.int64), MIB))

    def test_one_bad_span_among_many(self) -> None:
        pair = self.pair()
        pieces = random_pieces(self.rng, np.full(2000, 64, np.int64), MIB // 2)
        spans = pair.spans(pieces)
        spans.remote[1234] = np.uint64(64)
        allowed = pieces.after_write(pair.here.get(), pair.there.get())
        before = pair.there.get()
        with raises(RegionUnknown):
            self.write(pair.peer, spans)
        now = pair.there.get()
        assert ((now == before) | (now == allowed)).all(), "bytes outside every span changed"

    def test_malformed_spans(self) -> None:
        pair = self.pair()
        good = pair.whole(64)
        bad = [
            replace(good, nbytes=np.array([0], np.uint64)),
            replace(good, nbytes=np.array([64, 64], np.uint64)),
            replace(good, remote=good.remote.astype(np.int32)),
        ]
        for spans in bad:
            with raises(ValueError):
                pair.peer.read(spans, timeout=self.timeout)

    def test_revoked_regions_are_refused(self) -> None:
        pair = self.pair()
        other = self.buffer(MIB)
        pair.far.register(other.region)
        self.read(pair.peer, pair.whole(MIB))
        pair.far.revoke(pair.key_there)
        wanted = (RegionRevoked,) if self.reports_revoked else (RegionRevoked, RegionUnknown)
        before = pair.there.get()
        with raises(*wanted):
            self.read(pair.peer, pair.whole(64))
        with raises(*wanted):
            self.write(pair.peer, pair.whole(64))
        assert_same(pair.there.get(), before, "a revoked region")
        self.read(pair.peer, one_span(pair.here.region.address, other.region.address, MIB))
        assert_same(pair.here.get(), other.get(), "what was read from the region still there")

    def test_a_revoked_region_can_come_back(self) -> None:
        pair = self.pair()
        pair.far.revoke(pair.key_there)
        again = pair.far.register(pair.there.region)
        assert again != pair.key_there
        self.check_moves(pair, random_pieces(self.rng, np.full(4, KIB, np.int64), MIB))

    def test_revoking_stops_transfers_in_flight(self) -> None:
        pair = self.pair(self.large)
        transfer = pair.peer.write(pair.whole(self.large), timeout=self.timeout)
        pair.far.revoke(pair.key_there)
        after = pair.there.get()
        with _allowing(RegionRevoked, RegionUnknown):
            transfer.wait()
        if self.transport.can_revoke:
            assert_same(pair.there.get(), after, "a region revoked under a write")

    def test_a_revoked_local_region_is_refused(self) -> None:
        pair = self.pair()
        pair.near.revoke(pair.key_here)
        with raises(RegionRevoked, RegionUnknown):
            pair.peer.read(pair.whole(64), timeout=self.timeout)

    def test_regions_may_not_overlap(self) -> None:
        pair = self.pair()
        region = pair.here.region
        with raises(ValueError):
            pair.near.register(replace(region, address=region.address + MIB - 1))
        with raises(ValueError):
            pair.near.register(replace(region, nbytes=0))

    def test_revoking_an_unknown_key(self) -> None:
        pair = self.pair()
        pair.near.revoke(pair.key_here)
        with raises(RegionUnknown, RegionRevoked):
            pair.near.revoke(pair.key_here)

    def test_the_address_is_constant_and_reachable(self) -> None:
        pair = self.pair()
        address = pair.near.address
        assert isinstance(address, bytes)
        assert pair.near.address == address
        assert pair.near.transport == self.transport.name
        assert self.transport.reaches(address, pair.far.address) is None

    def test_an_address_of_something_else(self) -> None:
        near = self.open()
        for address in (b"", b"\x00" * 40, b"not an address", near.address[:-3]):
            with raises(TransferError):
                near.connect(address, timeout=self.timeout)
            reason = self.transport.reaches(near.address, address)
            assert reason, f"reaches() accepts {address!r}"

    def test_a_closed_endpoint_is_lost(self) -> None:
        near, far = self.open(), self.open()
        address = far.address
        far.close()
        started = time.monotonic()
        with raises(PeerLost):
            near.connect(address, timeout=self.timeout)
        assert time.monotonic() - started < self.timeout

    def test_the_wrong_secret_is_denied(self) -> None:
        if not self.checks_secret:
            return
        near = self.open()
        for secret in (b"", b"other", b"conformance "):
            far = self.open(secret=secret)
            with raises(AccessDenied):
                near.connect(far.address, timeout=self.timeout)
            with raises(AccessDenied):
                far.connect(near.address, timeout=self.timeout)

    def test_unknown_extra_settings_are_refused(self) -> None:
        with raises(ValueError, HalError):
            self.open(extra={"no_such_setting": "1"})

    def test_closing_the_peer_fails_transfers_in_flight(self) -> None:
        pair = self.pair(self.large)
        transfer = pair.peer.read(pair.whole(self.large), timeout=self.timeout)
        pair.peer.close()
        after = pair.here.get()
        assert transfer.poll() is not TransferState.PENDING
        with _allowing(PeerLost, TransferCancelled):
            transfer.wait()
        pair.there.put(self.rng.integers(0, 256, self.large, np.uint8))
        assert_same(pair.here.get(), after, "the near buffer after closing the peer")
        with raises(PeerLost):
            self.read(pair.peer, pair.whole(64))
        pair.peer.close()

    def test_a_closed_far_end_is_lost(self) -> None:
        pair = self.pair()
        self.read(pair.peer, pair.whole(64))
        pair.far.close()
        with raises(PeerLost, RegionRevoked):
            self.read(pair.peer, pair.whole(64))
            self.read(pair.peer, pair.whole(64))

    def test_closing_is_idempotent_and_final(self) -> None:
        pair = self.pair()
        pair.near.close()
        pair.near.close()
        with raises(TransferError):
            pair.near.register(self.buffer(KIB).region)
        with raises(TransferError):
            pair.near.connect(pair.far.address, timeout=self.timeout)
        with raises(TransferError):
            self.read(pair.peer, pair.whole(64))

    def test_connecting_again_after_closing(self) -> None:
        pair = self.pair()
        for _ in range(3):
            pair.peer.close()
            pair.peer = pair.near.connect(pair.far.address, timeout=self.timeout)
            self.check_moves(pair, random_pieces(self.rng, np.full(4, KIB, np.int64), MIB))


def _only(pieces: ScatteredPieces, index: int) -> ScatteredPieces:
    one = slice(index, index + 1)
    return ScatteredPieces(pieces.near[one], pieces.far[one], pieces.nbytes[one])


@contextmanager
def _allowing(*kinds: type[Exception]) -> Iterator[None]:
    """Let the body succeed or raise one of ``kinds``, for races with either outcome."""
    try:
        yield
    except kinds as exc:
        require_message(exc)


__all__ = [
    "MIB",
    "MemoryRegion",
    "Pair",
    "Transfer",
    "TransportConformance",
    "TransportKit",
    "one_span",
    "raises",
    "random_pieces",
    "stripes",
]
