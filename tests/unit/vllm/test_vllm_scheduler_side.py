"""What the scheduler side says of vLLM's KV; its life with a scheduler is tested in integration."""

from __future__ import annotations

import pytest

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_hal.latents import HALVES, PAIRS
from mooncake_vllm.rank_link import RankInfo
from mooncake_vllm.vllm_scheduler_side import rope_order

LATENTS = KVGeometry(AttentionKind.MLA, 1, 1, (512, 64), "bfloat16", 2)
HEADS = KVGeometry(AttentionKind.GQA, 1, 1, (64, 64), "bfloat16", 2)


@pytest.mark.parametrize(
    ("geometry", "device_type", "order"),
    [
        (LATENTS, "cuda", PAIRS),
        (LATENTS, "cpu", PAIRS),
        (LATENTS, "npu", HALVES),
        (HEADS, "npu", ""),
        (HEADS, "cuda", ""),
    ],
)
def test_rope_order_of_latents_follows_the_device(
    geometry: KVGeometry, device_type: str, order: str
) -> None:
    assert rope_order(RankInfo(geometry, 16, 1, Hardware(device_type, ""))) == order
