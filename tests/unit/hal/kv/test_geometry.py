"""Which part of a model's KV each rank holds under tensor and pipeline parallelism."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from mooncake_hal.errors import PlanError
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, layer_range, shard_of, shards_of


@given(st.integers(1, 200), st.data())
def test_stages_divide_the_layers_evenly_with_the_last_smallest(
    layers: int, data: st.DataObject
) -> None:
    pp_size = data.draw(st.integers(1, layers))
    ranges = [layer_range(layers, pp_size, stage) for stage in range(pp_size)]
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(range(layers))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@given(st.booleans(), st.integers(1, 9), st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_layer_and_head_has_the_stated_number_of_holders(
    mla: bool, layers: int, heads: int, tp_size: int, data: st.DataObject
) -> None:
    kind = AttentionKind.MLA if mla else AttentionKind.GQA
    geometry = KVGeometry(kind, layers, 1 if mla else heads, (4, 4), "float32", 4)
    pp_size = data.draw(st.integers(1, layers))
    shards = shards_of(geometry, tp_size, pp_size)
    assert len(shards) == pp_size * tp_size
    held = Counter(
        (layer, head)
        for shard in shards
        for layer in range(shard.layer_start, shard.layer_stop)
        for head in range(shard.head_start, shard.head_stop)
    )
    assert len(held) == layers * geometry.kv_heads
    for shard in shards:
        assert held[shard.layer_start, shard.head_start] == shard.replicas
        assert 0 <= shard.replica < shard.replicas
    assert len(set(shards)) == len(shards)


def test_stage_without_a_layer_is_rejected() -> None:
    geometry = KVGeometry(AttentionKind.GQA, 3, 2, (4, 4), "float32", 4)
    with pytest.raises(PlanError, match="stage 0 of 4 has none of 3 layers"):
        shard_of(geometry, 1, 0, 4)
    with pytest.raises(PlanError, match="rank 2 is not in a tensor-parallel group of 2"):
        shard_of(geometry, 2, 2)
