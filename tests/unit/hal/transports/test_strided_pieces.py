"""Pieces at equal strides are packed into few rows, and unpacked into the same pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shards_of
from mooncake_hal.kv.layout import KV_LAYOUTS, make_layout
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_hal.transports.copy_worker import split_parts
from mooncake_hal.transports.strided_pieces import (
    FEW_PIECES,
    LARGE_BYTES,
    MAX_LEVELS,
    num_levels,
    pack_strides,
    unpack_strides,
)

U64 = NDArray[np.uint64]
MOST = 1 << 16


def u64(values: object) -> U64:
    return np.array(values, np.uint64).ravel()


def again(addresses: U64, nbytes: U64) -> tuple[U64, U64]:
    rows = pack_strides(addresses, nbytes)
    return unpack_strides(rows.tobytes(), num_levels(rows), MOST)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 2**64 - 1, 2**63]), st.sampled_from([1, 1, 1, 2])),
        min_size=1,
        max_size=60,
    )
)
def test_any_pieces_round_trip_in_order(pieces: list[tuple[int, int]]) -> None:
    steps, nbytes = u64([step for step, _ in pieces]), u64([size for _, size in pieces])
    addresses = np.cumsum(steps, dtype=np.uint64)
    found = again(addresses, nbytes)
    assert found[0].tolist() == addresses.tolist()
    assert found[1].tolist() == nbytes.tolist()


def kv_pieces(blocks: list[int], layers: int, tokens: int, heads: int, nbytes: int) -> U64:
    """Addresses of each head and token of blocks, the head innermost; 64 KiB lie between tokens."""
    offset = np.add.outer(np.arange(layers) << 30, np.array(blocks) << 22)
    offset = np.add.outer(offset, np.arange(tokens) << 16)
    return u64(np.add.outer(offset, np.arange(heads) * nbytes * 2))


def test_heads_of_consecutive_blocks_become_one_row() -> None:
    addresses = kv_pieces([7, 8, 9, 10], 1, 16, 8, 256)
    rows = pack_strides(addresses, np.full(len(addresses), 256, np.uint64))
    assert rows.tolist() == [[7 << 22, 256, 8, 512, 16, 1 << 16, 4, 1 << 22]]


def test_scattered_blocks_become_a_row_each() -> None:
    blocks = np.random.default_rng(3).permutation(1000)[:30].tolist()
    addresses = kv_pieces(blocks, 4, 16, 8, 256)
    rows = pack_strides(addresses, np.full(len(addresses), 256, np.uint64))
    assert len(rows) <= 4 * 30
    assert rows.nbytes < 0.003 * 256 * len(addresses)


def test_rows_are_never_larger_than_single_pieces() -> None:
    addresses = np.random.default_rng(4).permutation(1 << 16).astype(np.uint64) << np.uint64(9)
    assert pack_strides(addresses, np.full(len(addresses), 256, np.uint64)).shape == (1 << 16, 2)


def test_large_pieces_are_not_packed() -> None:
    addresses = np.arange(100, dtype=np.uint64) << np.uint64(20)
    assert num_levels(pack_strides(addresses, np.full(100, LARGE_BYTES, np.uint64))) == 0
    assert num_levels(pack_strides(addresses, np.full(100, LARGE_BYTES - 1, np.uint64))) == 1


def test_few_pieces_are_not_packed() -> None:
    addresses = np.arange(FEW_PIECES + 1, dtype=np.uint64) << np.uint64(9)
    nbytes = np.full(FEW_PIECES + 1, 256, np.uint64)
    assert num_levels(pack_strides(addresses[1:], nbytes[1:])) == 0
    assert num_levels(pack_strides(addresses, nbytes)) == 1


@pytest.mark.parametrize(
    ("words", "levels", "message"),
    [
        ([], 0, "0 bytes are no rows of 0 levels"),
        ([1, 1, 1], 0, "24 bytes are no rows of 0 levels"),
        ([1, 1], 1, "16 bytes are no rows of 1 levels"),
        ([1, 1] * (MAX_LEVELS + 2), MAX_LEVELS + 1, "are no rows of 4 levels"),
        ([1, 1], -1, "16 bytes are no rows of -1 levels"),
        ([1, 1, 0, 1], 1, "rows are of 1 to 65536 pieces each"),
        ([1, 1, MOST + 1, 1], 1, "rows are of 1 to 65536 pieces each"),
        ([1, 1, 2**64 - 1, 1], 1, "rows are of 1 to 65536 pieces each"),
        ([1, 1] * (MOST + 1), 0, "rows are of 1 to 65536 pieces each"),
        ([1, 1, MOST, 1, MOST, 1, MOST, 1], 3, "65536 pieces at most are described at once"),
        ([1, 1, MOST, 1, 1, 1, 1, 1], 1, "65536 pieces at most are described at once"),
    ],
)
def test_malformed_rows_are_rejected(words: list[int], levels: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_strides(u64(words).tobytes(), levels, MOST)


GEOMETRY = KVGeometry(AttentionKind.GQA, 4, 12, (128, 128), "bfloat16", 2)
TOKENS, PART = 490, 8 << 20


def placements(tp_size: int, layout: str, block_size: int) -> list[KVShardSpec]:
    """Ranks with distant KV addresses, in pools that are eight times as large as the prompt."""
    num_blocks = 8 * -(-TOKENS // block_size)
    shards = shards_of(GEOMETRY, tp_size)
    layouts = [make_layout(layout, GEOMETRY, each, num_blocks, block_size) for each in shards]
    return [
        KVShardSpec(shard, each.shifted((rank + 1) << 40))
        for rank, (shard, each) in enumerate(zip(shards, layouts, strict=True))
    ]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("blocks", [(128, 16), (16, 128), (128, 128), (16, 16)], ids=str)
@pytest.mark.parametrize("layouts", list(itertools.product(KV_LAYOUTS, repeat=2)), ids="-".join)
def test_description_of_a_prompt_is_half_a_percent_of_its_kv(
    layouts: tuple[str, str], blocks: tuple[int, int], ranks: tuple[int, int]
) -> None:
    """For any two layouts, block sizes and numbers of ranks, with scattered blocks."""
    rng = np.random.default_rng(6)
    sides = zip(ranks, layouts, blocks, strict=True)
    theirs, ours = (placements(*each) for each in sides)
    transfer = BlockTransfer(
        *(rng.permutation(8 * -(-TOKENS // size))[:490].tolist() for size in reversed(blocks)),
        (0, TOKENS),
    )
    description_bytes = moved = 0
    for plan in (plan for each in ours for plan in plan_transfer(GEOMETRY, each, theirs, transfer)):
        for begin, end in split_parts(plan.spans.nbytes, PART):
            part = plan.spans.remote[begin:end], plan.spans.nbytes[begin:end]
            description_bytes += pack_strides(*part).nbytes
            moved += int(part[1].sum())
    assert moved == GEOMETRY.token_bytes * TOKENS
    assert description_bytes <= 0.005 * moved
