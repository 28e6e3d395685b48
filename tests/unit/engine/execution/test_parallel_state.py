"""The numbers and stages of ranks, and which of them samples and is the driver."""

from __future__ import annotations

from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shards_of

GEOMETRY = KVGeometry(AttentionKind.GQA, 7, 4, (16, 16), "float32", 4)


def test_ranks_are_numbered_stage_by_stage() -> None:
    places = [RankInfo(rank, tp_size=2, pp_size=3) for rank in range(6)]
    assert [(place.stage, place.tp_rank) for place in places] == [
        (stage, tp_rank) for stage in range(3) for tp_rank in range(2)
    ]
    assert [place.shard(GEOMETRY) for place in places] == shards_of(GEOMETRY, 2, 3)


def test_last_stage_samples_and_its_first_rank_is_the_driver() -> None:
    places = [RankInfo(rank, tp_size=2, pp_size=2) for rank in range(4)]
    assert [place.is_last_stage for place in places] == [False, False, True, True]
    assert [place.is_driver for place in places] == [False, False, True, False]
    alone = RankInfo()
    assert alone.is_last_stage
    assert alone.is_driver
