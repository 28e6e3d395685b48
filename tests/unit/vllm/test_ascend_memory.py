"""vLLM-Ascend's KV tuples described by strides: the planner moves KV between them, and to and from
vLLM's views on other hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.vllm_caches import (
    AscendCaches,
    copy_prompt,
    make_ascend_caches,
    make_caches,
    whole_prompt,
)

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_hal.kv.transfer_plan import BlockTransfer
from mooncake_vllm.ascend_memory import NZ_FORMAT, check_ascend, view_ascend_caches
from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_memory import ModelKV, RankPosition

GQA = ModelKV(AttentionKind.GQA, 3, 4, (8, 8), "float32")
MLA = ModelKV(AttentionKind.MLA, 2, 1, (12, 4), "float32")
SOURCE_BLOCKS, TARGET_BLOCKS = [5, 1, 4, 2], [3, 0, 6, 1]
NUM_TOKENS = 14
MOVEMENT = BlockTransfer(TARGET_BLOCKS, SOURCE_BLOCKS, (0, NUM_TOKENS))


def ranks(model: ModelKV, tp_size: int, **kwargs: Any) -> list[AscendCaches]:
    return [make_ascend_caches(model, 8, 4, tp=(r, tp_size), **kwargs) for r in range(tp_size)]


def same(targets: Any, sources: Any) -> bool:
    found, wanted = whole_prompt(targets, TARGET_BLOCKS), whole_prompt(sources, SOURCE_BLOCKS)
    return bool((found[:, :, :NUM_TOKENS] == wanted[:, :, :NUM_TOKENS]).all())


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_kv_moves_between_tuples(
    source_tp: int, target_tp: int, is_shared: bool, heads_first: bool
) -> None:
    sources = ranks(GQA, source_tp, is_shared=is_shared)
    targets = ranks(GQA, target_tp, heads_first=heads_first)
    copy_prompt(targets, sources, MOVEMENT)
    assert same(targets, sources)


def test_latent_and_rope_are_separate_tensors() -> None:
    sources, targets = ranks(MLA, 1), ranks(MLA, 2)
    copy_prompt(targets, sources, MOVEMENT)
    assert all(same([target], sources) for target in targets)
    assert [target.view.shard.replica for target in targets] == [0, 1]


@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BHLNC"])
def test_kv_is_exchanged_with_other_hardware(order: str, model: ModelKV) -> None:
    ascend, other = make_ascend_caches(model, 8, 4), make_caches(model, order, 8, 4)
    assert ascend.view.geometry == other.view.geometry
    copy_prompt([other], [ascend], MOVEMENT)
    assert same([other], [ascend])


def test_every_allocation_is_registered_once() -> None:
    apart, shared = make_ascend_caches(GQA, 8, 4), make_ascend_caches(GQA, 8, 4, is_shared=True)
    for caches in (apart, shared):
        tensors = [tensor for layer in caches.layers.values() for tensor in layer]
        for tensor in tensors:
            inside = [
                region
                for region in caches.view.regions
                if region.address <= tensor.data_ptr() < region.address + region.nbytes
            ]
            assert len(inside) == 1
        nbytes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(region.nbytes for region in caches.view.regions) == sum(nbytes.values())


def refusal(layers: dict[str, Any], model: ModelKV = GQA, num_blocks: int = 8) -> str:
    with pytest.raises(UnsupportedByVllmConnector) as refused:
        view_ascend_caches(layers, model, RankPosition(0, 1, "cpu"), num_blocks)
    return str(refused.value)


def test_unsupported_memory_is_rejected_by_name() -> None:
    layers = make_ascend_caches(GQA, 8, 4).layers
    with_indexer = {name: (*planes, planes[0]) for name, planes in layers.items()}
    assert "sparse attention's indexers" in refusal(with_indexer)
    assert "is not [blocks, tokens, heads, dim]" in refusal(layers, num_blocks=3)
    first = next(iter(layers))
    odd = layers | {first: tuple(plane[:, :2] for plane in layers[first])}
    assert "hybrid models" in refusal(odd)
    scattered = {
        name: tuple(torch.rand(8, 4, 8, 4).transpose(2, 3) for _ in planes)
        for name, planes in layers.items()
    }
    assert "the elements of a head in a row" in refusal(scattered)


def test_tiles_are_rejected_by_name() -> None:
    check_ascend({}, [2])
    check_ascend(object(), [])
    with pytest.raises(UnsupportedByVllmConnector, match="enable_kv_nz"):
        check_ascend({"enable_kv_nz": True}, [])
    with pytest.raises(UnsupportedByVllmConnector, match="FRACTAL_NZ"):
        check_ascend({}, [NZ_FORMAT])
