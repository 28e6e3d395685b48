"""The transfer planner, checked against a dense oracle over random models, ratios and layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mooncake_hal.errors import PlanError
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, KVGroup, shard_of, shards_of
from mooncake_hal.kv.layout import KV_LAYOUTS, layout_bytes, make_layout
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer

NUM_BLOCKS = 40
GUARD = 32


@dataclass
class Side:
    """All ranks of one instance, with real memory behind them."""

    placements: list[KVShardSpec]
    memories: list[np.ndarray]
    blocks: list[int]

    def fill(self, geometry: KVGeometry, dense: np.ndarray, tokens: range, only: int | None = None):
        """Write the dense KV to the addresses of each rank's layout."""
        for rank, (placement, memory) in enumerate(
            zip(self.placements, self.memories, strict=True)
        ):
            if only is None or rank == only:
                _fill_rank(geometry, placement, memory, self.blocks, dense, tokens)


def _fill_rank(geometry, placement, memory, blocks, dense, tokens) -> None:
    layout, shard = placement.layout, placement.shard
    for layer in range(shard.layer_start, shard.layer_stop):
        for plane, dim in enumerate(geometry.plane_dims):
            width = dim * geometry.element_bytes
            for head in range(shard.head_start, shard.head_stop):
                for token in tokens:
                    address = (
                        layout.bases[plane][layer - shard.layer_start]
                        + blocks[token // layout.block_size] * layout.block_strides[plane]
                        + (head - shard.head_start) * layout.head_strides[plane]
                        + token % layout.block_size * layout.token_strides[plane]
                    )
                    memory[address : address + width] = dense[layer, plane, head, token, :width]


def make_side(geometry, tp_size, layout_name, block_size, blocks, pp_size=1) -> Side:
    placements, memories = [], []
    for shard in shards_of(geometry, tp_size, pp_size):
        nbytes = layout_bytes(geometry, shard, NUM_BLOCKS, block_size)
        layout = make_layout(layout_name, geometry, shard, NUM_BLOCKS, block_size)
        placements.append(KVShardSpec(shard, layout.shifted(GUARD)))
        memories.append(np.zeros(nbytes + 2 * GUARD, dtype=np.uint8))
    return Side(placements, memories, blocks)


geometries = st.builds(
    lambda mla, layers, heads, element_bytes: KVGeometry(
        AttentionKind.MLA if mla else AttentionKind.GQA,
        layers,
        1 if mla else heads,
        (5, 2) if mla else (3, 3),
        "test",
        element_bytes,
    ),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([1, 2]),
)
tp_sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
layout_names = st.sampled_from(sorted(KV_LAYOUTS))
block_sizes = st.sampled_from([1, 2, 3, 4, 16])


@settings(max_examples=300)
@given(data=st.data(), geometry=geometries, source_tp=tp_sizes, target_tp=tp_sizes)
def test_every_pair_of_placements_moves_exactly_the_wanted_bytes(
    data: st.DataObject, geometry: KVGeometry, source_tp: int, target_tp: int
) -> None:
    stop = data.draw(st.integers(1, 20), label="stop")
    start = data.draw(st.integers(0, stop), label="start")
    sides = []
    for tp_size in (source_tp, target_tp):
        size = data.draw(block_sizes, label="block size")
        order = data.draw(st.permutations(range(NUM_BLOCKS)), label="blocks")
        name = data.draw(layout_names, label="layout")
        stages = data.draw(st.integers(1, geometry.layers), label="pp size")
        sides.append(make_side(geometry, tp_size, name, size, order[: -(-stop // size)], stages))
    source, target = sides
    generator = np.random.default_rng(0)
    widest = max(geometry.plane_dims) * geometry.element_bytes
    dense = generator.integers(
        1, 255, (geometry.layers, 2, geometry.kv_heads, stop, widest), dtype=np.uint8
    )
    source.fill(geometry, dense, range(stop))
    spread = data.draw(st.integers(0, 99), label="spread")
    movement = BlockTransfer(target.blocks, source.blocks, (start, stop), spread=spread)
    for rank, placement in enumerate(target.placements):
        expected = target.memories[rank].copy()
        _fill_rank(geometry, placement, expected, target.blocks, dense, range(start, stop))
        for plan in plan_transfer(geometry, placement, source.placements, movement):
            columns = (plan.spans.local, plan.spans.remote, plan.spans.nbytes)
            for local, remote, nbytes in zip(*(c.tolist() for c in columns), strict=True):
                target.memories[rank][local : local + nbytes] = source.memories[plan.peer][
                    remote : remote + nbytes
                ]
        assert (target.memories[rank] == expected).all()


LLAMA = KVGeometry(AttentionKind.GQA, 32, 8, (128, 128), "bfloat16", 2)


def _placements(tp_size: int, layout: str, num_blocks: int = 64) -> list[KVShardSpec]:
    shards = [shard_of(LLAMA, tp_size, rank) for rank in range(tp_size)]
    return [KVShardSpec(s, make_layout(layout, LLAMA, s, num_blocks, 16)) for s in shards]


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (4, 2), (2, 4), (8, 1)])
def test_block_major_layout_moves_one_run_per_block_at_any_ratio(
    source_tp: int, target_tp: int
) -> None:
    blocks = list(range(0, 64, 2))
    plans = plan_transfer(
        LLAMA,
        _placements(target_tp, "BHLPT")[0],
        _placements(source_tp, "BHLPT"),
        BlockTransfer(blocks, blocks, (0, 512)),
    )
    assert [len(plan.spans) for plan in plans] == [32] * max(1, source_tp // target_tp)


def test_consecutive_blocks_of_equal_layouts_become_one_run() -> None:
    plans = plan_transfer(
        LLAMA,
        _placements(1, "BHLPT")[0],
        _placements(1, "BHLPT"),
        BlockTransfer(range(10, 42), range(0, 32), (0, 512)),
    )
    assert [len(plan.spans) for plan in plans] == [1]
    assert plans[0].spans.total_bytes == 512 * LLAMA.token_bytes


def test_replicas_are_used_in_turn() -> None:
    geometry = KVGeometry(AttentionKind.MLA, 2, 1, (5, 2), "test", 1)
    sources = make_side(geometry, 4, "LPBTH", 4, [0]).placements
    target = make_side(geometry, 1, "LPBTH", 4, [0]).placements[0]
    peers = [
        plan_transfer(geometry, target, sources, BlockTransfer([0], [1], (0, 3), spread=spread))[
            0
        ].peer
        for spread in range(8)
    ]
    assert peers == [0, 1, 2, 3, 0, 1, 2, 3]


def test_peer_that_lacks_heads_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"make 256 \(layer, head\) pairs.*hold 128"):
        plan_transfer(
            LLAMA,
            _placements(1, "BHLPT")[0],
            _placements(2, "BHLPT")[:1],
            BlockTransfer([0], [0], (0, 16)),
        )


def test_block_tables_that_do_not_fit_are_rejected() -> None:
    placement = _placements(1, "BHLPT")[0]
    with pytest.raises(PlanError, match="17 tokens need 2 remote blocks of 16, the table has 1"):
        plan_transfer(LLAMA, placement, [placement], BlockTransfer([0, 1], [0], (0, 17)))
    with pytest.raises(PlanError, match="local block 64 is not in a pool of 64"):
        plan_transfer(LLAMA, placement, [placement], BlockTransfer([64], [0], (0, 16)))


def test_blocks_before_the_tokens_are_not_read() -> None:
    """A push plans each layer of each chunk: reading whole block tables would take time quadratic
    in the prompt."""
    unread = [None] * 1000
    [plan] = plan_transfer(
        LLAMA,
        _placements(1, "BHLPT")[0],
        _placements(1, "BHLPT"),
        BlockTransfer([*unread, 5], [*unread, 6], (16_000, 16_016), (3, 4)),
    )
    [first] = plan_transfer(
        LLAMA,
        _placements(1, "BHLPT")[0],
        _placements(1, "BHLPT"),
        BlockTransfer([5], [6], (0, 16), (3, 4)),
    )
    assert plan.spans.local.tolist() == first.spans.local.tolist()
    assert plan.spans.remote.tolist() == first.spans.remote.tolist()


def test_nothing_to_move_is_an_empty_plan() -> None:
    placement = _placements(1, "BHLPT")[0]
    assert plan_transfer(LLAMA, placement, [placement], BlockTransfer([0], [0], (16, 16))) == []


def _grouped(geometry: KVGeometry, window: int) -> KVGeometry:
    """Every second layer has a sliding window, and blocks of its own."""
    sliding = tuple(range(0, geometry.layers, 2))
    full = tuple(range(1, geometry.layers, 2))
    return replace(geometry, groups=(KVGroup(sliding, window), KVGroup(full)))


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("unit", [1, 4])
def test_each_group_moves_its_own_blocks_within_its_window(
    source_tp: int, target_tp: int, unit: int
) -> None:
    plain = KVGeometry(AttentionKind.GQA, 5, 4, (3 * unit, 3 * unit), "test", 1, unit)
    geometry, stop, window, size = _grouped(plain, 6), 22, 6, 4
    sliding, full = [9, 9, 9, 9, 5, 6], [1, 2, 3, 4, 7, 8]  # 9: dropped, never accessed
    of_source = [block for pair in zip(sliding, full, strict=True) for block in pair]
    of_target = [39 - block for block in of_source]
    per_token = sum(plain.plane_dims) // unit
    for layers in (None, (0, 1), (1, 4)):
        moved = {layer: 0 for layer in range(5)}
        for placement in make_side(plain, target_tp, "LPBHT", size, []).placements:
            for plan in plan_transfer(
                geometry,
                placement,
                make_side(plain, source_tp, "BHLPT", size, []).placements,
                BlockTransfer(of_target, of_source, (4, stop), layers),
            ):
                for address, nbytes in zip(
                    plan.spans.local.tolist(), plan.spans.nbytes.tolist(), strict=True
                ):
                    layer, block = _place(placement, address)
                    own = sliding if layer % 2 == 0 else full
                    assert 39 - block in {*own[1:]} - {9}
                    moved[layer] += nbytes
        for layer, nbytes in moved.items():
            wanted = layers is None or layers[0] <= layer < layers[1]
            first = (stop - window + 1) // size * size if layer % 2 == 0 else 4
            last = -(-stop // unit) * unit
            assert nbytes == wanted * (last - first) * 4 * per_token


def _place(placement: KVShardSpec, address: int) -> tuple[int, int]:
    """Return layer and block of an address in a layout whose outermost dimensions are layers and
    planes."""
    layout = placement.layout
    for plane, bases in enumerate(layout.bases):
        for layer, base in enumerate(bases):
            offset = address - base
            if 0 <= offset < layout.num_blocks * layout.block_strides[plane]:
                return layer, offset // layout.block_strides[plane]
    raise AssertionError(address)


def test_window_is_counted_from_the_prompts_end() -> None:
    geometry = _grouped(KVGeometry(AttentionKind.GQA, 2, 1, (4, 4), "test", 1), 8)
    side = make_side(replace(geometry, groups=()), 1, "LPBHT", 4, []).placements
    blocks = list(range(20))

    def num_bytes(tokens: tuple[int, int]) -> int:
        movement = BlockTransfer(blocks, blocks, tokens, prompt_stop=40)
        return sum(p.spans.total_bytes for p in plan_transfer(geometry, side[0], side, movement))

    assert num_bytes((0, 16)) == 16 * 8  # none of it is in the window
    assert num_bytes((16, 40)) == 24 * 8 + 8 * 8  # tokens from 32, where a block begins
