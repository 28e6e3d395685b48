"""The region table, checked against brute force, and its errors for unknown addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mooncake_hal.errors import OutOfBounds, RegionRevoked, RegionUnknown, TransferError
from mooncake_hal.session.regions import RegionTable, check_spans
from mooncake_hal.transport import MemoryRegion, Spans

SMALL = st.integers(0, 60)


def table_of(*regions: tuple[int, int]) -> RegionTable:
    table = RegionTable("the peer")
    for key, (address, nbytes) in enumerate(regions, 1):
        table.add(key, MemoryRegion(address, nbytes))
    return table


def array(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@given(st.lists(st.tuples(SMALL, st.integers(1, 9)), max_size=8), SMALL, st.integers(1, 12))
def test_find_agrees_with_brute_force(
    regions: list[tuple[int, int]], address: int, nbytes: int
) -> None:
    table = RegionTable("the peer")
    owner: dict[int, int] = {}
    for key, (start, size) in enumerate(regions, 1):
        cells = range(start, start + size)
        if any(cell in owner for cell in cells):
            with pytest.raises(ValueError, match="overlaps"):
                table.add(key, MemoryRegion(start, size))
        else:
            table.add(key, MemoryRegion(start, size))
            owner |= dict.fromkeys(cells, key)
    owners = {owner.get(cell) for cell in range(address, address + nbytes)}
    expected = owners.pop() if len(owners) == 1 else None
    if expected is not None:
        assert table.find(address, nbytes) == expected
        index, at = table.find_all(array(address), array(nbytes))
        assert index.keys[at[0]] == expected
        return
    wanted = OutOfBounds if owner.get(address) else RegionUnknown
    with pytest.raises(wanted):
        table.find(address, nbytes)
    with pytest.raises(wanted):
        table.find_all(array(address), array(nbytes))


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(2**64 - 1, 1), (2**64 - 8, 2**63), (0, 2**64 - 1), (150, 2**64 - 1), (99, 1), (2**63, 5)],
)
def test_address_arithmetic_does_not_wrap_around(address: int, nbytes: int) -> None:
    table = table_of((100, 100))
    with pytest.raises((RegionUnknown, OutOfBounds)):
        table.find_all(array(address), array(nbytes))
    with pytest.raises((RegionUnknown, OutOfBounds)):
        table.find(address, nbytes)


def test_first_invalid_span_of_a_batch_is_named() -> None:
    table = table_of((100, 100), (300, 100))
    index, at = table.find_all(array(110, 399, 100), array(5, 1, 100))
    assert [index.keys[position] for position in at] == [1, 2, 1]
    with pytest.raises(OutOfBounds, match=r"\[0xbe, 0xd2\) begins in the peer's region"):
        table.find_all(array(110, 190, 0), array(5, 20, 1))


def test_revoked_and_unknown_regions_are_distinguished() -> None:
    table = table_of((100, 100))
    table.revoke(1)
    with pytest.raises(RegionRevoked, match="has been revoked"):
        table.find(150, 10)
    with pytest.raises(RegionUnknown, match="lies in no region that the peer registered"):
        table.find(500, 10)
    with pytest.raises(RegionRevoked, match="region 1 of the peer is revoked already"):
        table.revoke(1)
    with pytest.raises(RegionUnknown, match="registered no region 7"):
        table.revoke(7)


def test_new_region_replaces_a_revoked_one() -> None:
    table = table_of((100, 100))
    table.revoke(1)
    table.add(2, MemoryRegion(100, 50))
    assert table.find(100, 50) == 2
    assert table.revoked_ranges() == [(100, 200)]


@pytest.mark.parametrize("region", [(100, 0), (-1, 5), (2**64 - 1, 2)])
def test_invalid_regions_are_rejected(region: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 or more bytes of memory"):
        table_of(region)


@pytest.mark.parametrize(
    ("local", "remote", "nbytes", "message"),
    [
        (array(1), array(1), array(0), "holds a zero"),
        (array(1, 2), array(1), array(1), r"spans.local must be .* \(1,\)"),
        (array(1), array(1).astype(np.int64), array(1), "spans.remote must be"),
        (array(1, 2, 3)[::2], array(1, 2), array(1, 1), "contiguous"),
    ],
)
def test_malformed_spans_are_rejected(
    local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_spans(Spans(local, remote, nbytes))


def test_region_errors_are_transfer_errors() -> None:
    with pytest.raises(TransferError):
        table_of().find_all(array(1), array(1))
