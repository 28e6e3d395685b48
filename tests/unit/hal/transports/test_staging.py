"""Packed pieces in staging buffers, and malformed requests of peers for them."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.staging import PackedPieces, StagingLimits, packed_addresses

LIMITS = StagingLimits("test", slots=2, slot_bytes=1 << 20)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_packed_pieces_are_contiguous() -> None:
    assert packed_addresses(100, numbers(3, 5, 2)).tolist() == [100, 103, 108]


@pytest.mark.parametrize(
    ("addresses", "nbytes", "words"),
    [
        (numbers(), numbers(), "test: a buffer's pieces can't be read: 0 bytes are no rows"),
        (numbers(1), numbers(0), "must have 1 to"),
        (numbers(1), numbers(LIMITS.slot_bytes + 1), "must have 1 to"),
        (numbers(1, 2), numbers(2**63, 2**63), "must have 1 to"),
    ],
)
def test_request_with_invalid_pieces_is_rejected(
    addresses: np.ndarray, nbytes: np.ndarray, words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        LIMITS.read_pieces(0, PackedPieces.of(addresses, nbytes))


def test_unknown_slot_is_rejected() -> None:
    one = PackedPieces.of(numbers(1), numbers(1))
    with pytest.raises(TransferError, match="there are 2 buffers, 2 is none of them"):
        LIMITS.read_pieces(2, one)
