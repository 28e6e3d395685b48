"""A push's writers write the same bytes that the readers of a pull would read: each exactly
once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_hal.errors import PlanError
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, KVGroup, shard_of, shards_of
from mooncake_hal.kv.layout import KV_LAYOUTS, make_layout
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_kv.push_progress import InstancePair, expected_bytes, plan_push

NUM_BLOCKS = 40
SPACE = 1 << 32
"""Address distance between ranks, so that an address identifies its rank."""

uniform_geometries = st.one_of(
    st.builds(
        lambda heads, layers: KVGeometry(AttentionKind.GQA, layers, heads, (4, 4), "float16", 2),
        st.sampled_from([1, 2, 4, 6, 8]),
        st.integers(1, 3),
    ),
    st.builds(
        lambda layers: KVGeometry(AttentionKind.MLA, layers, 1, (8, 2), "float16", 2),
        st.integers(1, 3),
    ),
)


@st.composite
def grouped_geometries(draw: st.DrawFn) -> KVGeometry:
    """Layers in one to three KV-cache groups, some with a sliding window."""
    geometry = draw(uniform_geometries)
    group_of = draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))[: geometry.layers]
    members = [
        tuple(layer for layer, group in enumerate(group_of) if group == wanted)
        for wanted in sorted({*group_of})
    ]
    windows = draw(st.lists(st.sampled_from([0, 2, 7, 30]), min_size=3, max_size=3))
    return replace(geometry, groups=tuple(map(KVGroup, members, windows)))


geometries = uniform_geometries | grouped_geometries()


def shard_specs(
    geometry: KVGeometry, ranks: tuple[int, int], layout: str, block_size: int
) -> tuple[KVShardSpec, ...]:
    shards = shards_of(geometry, *ranks)
    return tuple(
        KVShardSpec(
            shard,
            make_layout(layout, geometry, shard, NUM_BLOCKS, block_size).shifted(rank * SPACE),
        )
        for rank, shard in enumerate(shards)
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[InstancePair, BlockTransfer]:
    geometry = draw(geometries)
    sides = []
    tables = []
    block_sizes = [draw(st.sampled_from([4, 16]))]
    block_sizes.append(block_sizes[0] if geometry.groups else draw(st.sampled_from([4, 16])))
    for block_size in block_sizes:
        ranks = draw(st.integers(1, 8)), draw(st.integers(1, geometry.layers))
        layout = draw(st.sampled_from(sorted(KV_LAYOUTS)))
        sides.append(shard_specs(geometry, ranks, layout, block_size))
        of_groups = [draw(st.permutations(range(NUM_BLOCKS))) for _ in geometry.tables]
        tables.append([block for row in zip(*of_groups, strict=True) for block in row])
    start = draw(st.integers(0, 60))
    tokens = start, draw(st.integers(start + 1, 100))
    spread = draw(st.integers(0, 1000))
    return InstancePair(geometry, sides[0], sides[1]), BlockTransfer(*tables, tokens, None, spread)


def expected_by(sides: InstancePair, movement: BlockTransfer) -> dict[tuple[int, int], int]:
    shards = [[p.shard for p in side] for side in (sides.writers, sides.readers)]
    block_size = sides.readers[0].layout.block_size
    return expected_bytes(sides.geometry, *shards, movement.tokens, movement.spread, block_size)


def bytes_of(local: list[int], remote: list[int], nbytes: list[int]) -> Counter[tuple[int, int]]:
    """Every pair of moved bytes as (source, destination); elements are two bytes wide."""
    return Counter(
        (source + step, target + step)
        for source, target, count in zip(local, remote, nbytes, strict=True)
        for step in range(0, count, 2)
    )


@settings(max_examples=150)
@given(cases())
def test_push_writes_same_bytes_as_pull_reads(
    case: tuple[InstancePair, BlockTransfer],
) -> None:
    sides, movement = case
    written: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    totals: dict[tuple[int, int], int] = {}
    for writer in range(len(sides.writers)):
        for plan in plan_push(sides, writer, movement):
            spans = plan.spans
            columns = spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist()
            written[plan.peer] += bytes_of(*columns)
            totals[writer, plan.peer] = spans.total_bytes
    swapped = BlockTransfer(
        movement.remote_blocks, movement.local_blocks, movement.tokens, None, movement.spread
    )
    for index, reader in enumerate(sides.readers):
        wanted: Counter[tuple[int, int]] = Counter()
        for plan in plan_transfer(sides.geometry, reader, sides.writers, swapped):
            spans = plan.spans
            wanted += bytes_of(spans.remote.tolist(), spans.local.tolist(), spans.nbytes.tolist())
        assert written[index] == wanted
    assert totals == expected_by(sides, movement)


@settings(max_examples=60)
@given(cases(), st.data())
def test_chunks_and_layers_add_up_to_the_whole(
    case: tuple[InstancePair, BlockTransfer], data: st.DataObject
) -> None:
    sides, movement = case
    start, stop = movement.tokens
    cut = data.draw(st.integers(start, stop))
    sums: Counter[tuple[int, int]] = Counter()
    for tokens in ((start, cut), (cut, stop)):
        for layer in range(sides.geometry.layers):
            part = BlockTransfer(
                movement.local_blocks,
                movement.remote_blocks,
                tokens,
                (layer, layer + 1),
                movement.spread,
                stop,
            )
            for writer in range(len(sides.writers)):
                for plan in plan_push(sides, writer, part):
                    sums[writer, plan.peer] += plan.spans.total_bytes
    assert dict(sums) == expected_by(sides, movement)


def test_empty_plan_expects_no_bytes() -> None:
    geometry = KVGeometry(AttentionKind.GQA, 2, 2, (4, 4), "float16", 2)
    shard = shard_of(geometry, 1, 0)
    assert expected_bytes(geometry, [shard], [shard], (3, 3), 0, 4) == {}


def test_writers_without_all_heads_are_rejected() -> None:
    geometry = KVGeometry(AttentionKind.GQA, 2, 2, (4, 4), "float16", 2)
    whole, half = shard_of(geometry, 1, 0), shard_of(geometry, 2, 0)
    with pytest.raises(PlanError, match="hold 2 of them"):
        expected_bytes(geometry, [half], [whole], (0, 10), 0, 4)
