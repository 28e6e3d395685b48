"""The part of the transport suite about counts, lengths and offsets: those that 16 or 32 bits can't
hold, and those that are multiples of nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mooncake_hal.errors import OutOfBounds, RegionUnknown
from mooncake_hal.testing.transports_buffers import (
    GAP_BYTES,
    ScatteredPieces,
    random_pieces,
    resolve,
)
from mooncake_hal.testing.transports_kit import (
    KIB,
    MIB,
    TransportKit,
    assert_same,
    one_span,
    raises,
)
from mooncake_hal.transport import Endpoint, MemoryRegion, Spans

_NUM_PIECES = 70_000
_PIECE = MIB // 2
_WRAP = 1 << 32


class SizesSuite(TransportKit):
    """Cases with two endpoints of one process; part of ``TransportConformance``."""

    def test_more_pieces_than_16_bits_count(self) -> None:
        """Tens of thousands of pieces in one batch: a long prompt's tokens on unequal numbers of
        ranks."""
        size = 48
        nbytes = _NUM_PIECES * (size + GAP_BYTES)
        pair = self.pair(nbytes)
        sizes = self.rng.integers(1, size + 1, _NUM_PIECES).astype(np.int64)
        self.check_moves(pair, random_pieces(self.rng, sizes, nbytes))

    def test_more_bytes_than_32_bits_count(self) -> None:
        """The last piece of a transfer of more than 4 GiB arrives, too. All earlier ones are the
        same, so that the transfer needs little memory."""
        if not self.moves_4_gib:
            pytest.skip("this suite leaves out transfers of more than 4 GiB")
        pair = self.pair(2 * _PIECE)
        count = _WRAP // _PIECE + 1
        offsets = np.zeros(count, np.int64)
        offsets[-1] = _PIECE
        sizes = np.full(count, _PIECE, np.int64)
        spans = pair.spans(ScatteredPieces(offsets, offsets, sizes))
        self.read(pair.peer, spans)
        assert_same(pair.here.get(), pair.there.get(), "the near buffer after a huge read")
        pair.here.put(self.rng.integers(0, 256, 2 * _PIECE, np.uint8))
        self.write(pair.peer, spans)
        assert_same(pair.there.get(), pair.here.get(), "the far buffer after a huge write")

    def test_offsets_that_32_bits_cannot_hold(self) -> None:
        """Two pieces of a region whose distance is 4 GiB are not taken for each other. Only these
        few pages of it are used."""
        if not self.registers_4_gib:
            pytest.skip("this suite leaves out regions of more than 4 GiB")
        pair = self.pair(2 * KIB)
        near, far = (self._far_pieces(endpoint) for endpoint in (pair.near, pair.far))
        mine, theirs = (
            np.array([buffer.region.address, buffer.region.address + KIB], np.uint64)
            for buffer in (pair.here, pair.there)
        )
        sizes, wanted = np.full(2, KIB, np.uint64), pair.here.get()
        self.write(pair.peer, Spans(mine, far, sizes))
        self.read(pair.peer, Spans(near, far, sizes))
        self.write(pair.peer, Spans(near, theirs, sizes))
        assert_same(pair.there.get(), wanted, "what went through far offsets of both ends")

    def test_a_region_of_odd_length_at_an_odd_address(self) -> None:
        """Its first and last bytes move; the neighbours on either side are out of reach, for this
        end as for the peer."""
        nbytes, first = 5 * 4096 + 1235, 77 if self.any_region_address else 0
        pair = self.pair(MIB, lambda region: _part(region, first, nbytes))
        here, there = (buffer.region.address + first for buffer in (pair.here, pair.there))
        begins = np.array([first, first + nbytes - 1, first + 64], np.int64)
        sizes = np.array([1, 1, 5000], np.int64)
        self.check_moves(pair, ScatteredPieces(begins, begins[[1, 0, 2]], sizes))
        self.read(pair.peer, one_span(here, there, nbytes))
        before = pair.here.get(), pair.there.get()
        for move in (self.read, self.write):
            for outside, size in ((nbytes - 1, 2), (nbytes, 1), (-1, 1), (-1, 2)):
                with raises(OutOfBounds, RegionUnknown):
                    move(pair.peer, one_span(here, there + outside, size))
                with raises(OutOfBounds, RegionUnknown):
                    move(pair.peer, one_span(here + outside, there, size))
        assert_same(pair.here.get(), before[0], "the near buffer after refused transfers")
        assert_same(pair.there.get(), before[1], "the far buffer after refused transfers")

    def _far_pieces(self, endpoint: Endpoint) -> np.ndarray:
        """Register a large region; returns the addresses of two pieces of it."""
        buffer = resolve(self.allocator)(_WRAP + MIB)
        self.stack.callback(buffer.close)
        self.stack.callback(endpoint.close)  # before the memory that it has registered
        endpoint.register(buffer.region)
        begin = buffer.region.address + 4096
        return np.array([begin, begin + _WRAP], np.uint64)


def _part(region: MemoryRegion, begin: int, nbytes: int) -> MemoryRegion:
    """A part of a region, as a region of its own."""
    address, offset = region.address + begin, region.fd_offset + begin
    return replace(region, address=address, nbytes=nbytes, fd_offset=offset)
