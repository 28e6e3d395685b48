"""Duration of transfer planning when nothing can be merged: one span per token, head, plane and
layer."""

from __future__ import annotations

import random
import time

from support.figures import Figure, record

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import make_layout
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer

SPANS = 100_000
TOKENS = 1_600
GEOMETRY = KVGeometry(AttentionKind.GQA, 4, 8, (128, 128), "bfloat16", 2)
ROUNDS = 9


def placement(tp_size: int, layout: str, block_size: int) -> KVShardSpec:
    shard = shard_of(GEOMETRY, tp_size, 0)
    num_blocks = TOKENS // block_size + 1
    return KVShardSpec(shard, make_layout(layout, GEOMETRY, shard, num_blocks, block_size))


def test_plan_of_100_000_spans(benchmark) -> None:
    """Layouts without common order: heads outside of tokens on this side, inside on the other."""
    here, there = placement(1, "BHLPT", 16), placement(1, "LPBTH", 128)
    local, remote = (list(range(TOKENS // size + 1)) for size in (16, 128))
    random.Random(0).shuffle(local)
    movement = BlockTransfer(local, remote, (0, TOKENS))
    times, found = [], 0

    def plan() -> None:
        nonlocal found
        started = time.perf_counter()
        found = sum(len(part.spans) for part in plan_transfer(GEOMETRY, here, [there], movement))
        times.append(time.perf_counter() - started)

    benchmark.pedantic(plan, rounds=ROUNDS)
    assert found >= SPANS
    record(
        benchmark,
        Figure(
            f"planning {found:,} spans",
            min(times) * 1e3,
            50.0,
            "ms",
            at_least=False,
            context=f"best of {ROUNDS}, two layouts that agree in nothing",
        ),
    )
