"""KV memory described by strides: with every layout of vLLM, the planner moves the right
elements."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.vllm_caches import (
    ORDERS,
    Caches,
    ModelKV,
    copy_prompt,
    make_caches,
    whole_prompt,
)

from mooncake_hal.kv.geometry import AttentionKind, KVShard
from mooncake_hal.kv.transfer_plan import BlockTransfer
from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_memory import RankPosition, expand_blocks, layer_index, view_caches

GQA = ModelKV(AttentionKind.GQA, 3, 4, (8, 8), "float32")
MLA = ModelKV(AttentionKind.MLA, 2, 1, (12, 4), "float32")
SOURCE_BLOCKS, TARGET_BLOCKS = [5, 1, 4, 2], [3, 0, 6, 1]
NUM_TOKENS = 14


def pull(targets: list[Caches], sources: list[Caches], tokens: tuple[int, int]) -> None:
    copy_prompt(targets, sources, BlockTransfer(TARGET_BLOCKS, SOURCE_BLOCKS, tokens))


def side(model: ModelKV, order: str, tp_size: int, seed: int) -> list[Caches]:
    ranks = [make_caches(model, order, 8, 4, tp=(rank, tp_size)) for rank in range(tp_size)]
    random = np.random.default_rng(seed)
    for rank in ranks:
        rank.fill(random.random(rank.stacked().shape, dtype=np.float32))
    return ranks


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ORDERS, ORDERS)))
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_every_layout_reads_from_every_other(
    source: str, target: str, source_tp: int, target_tp: int
) -> None:
    sources, targets = side(GQA, source, source_tp, 1), side(GQA, target, target_tp, 2)
    before = whole_prompt(targets, TARGET_BLOCKS)
    pull(targets, sources, (0, NUM_TOKENS))
    wanted, found = whole_prompt(sources, SOURCE_BLOCKS), whole_prompt(targets, TARGET_BLOCKS)
    assert (found[:, :, :NUM_TOKENS] == wanted[:, :, :NUM_TOKENS]).all()
    assert (found[:, :, NUM_TOKENS:] == before[:, :, NUM_TOKENS:]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_are_already_loaded_stay_unchanged(order: str) -> None:
    sources, targets = side(GQA, order, 1, 1), side(GQA, order, 1, 2)
    before = targets[0].stacked()
    pull(targets, sources, (8, NUM_TOKENS))
    after = targets[0].stacked()
    untouched = [block for block in range(8) if block not in TARGET_BLOCKS[2:]]
    assert (after[:, untouched] == before[:, untouched]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_latents_are_one_row_with_two_planes(order: str) -> None:
    sources, targets = side(MLA, order, 1, 1), side(MLA, order, 1, 2)
    assert targets[0].view.geometry.plane_dims == (12, 4)
    pull(targets, sources, (0, NUM_TOKENS))
    wanted, found = whole_prompt(sources, SOURCE_BLOCKS), whole_prompt(targets, TARGET_BLOCKS)
    assert (found[:, :, :NUM_TOKENS] == wanted[:, :, :NUM_TOKENS]).all()


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2)])
def test_opaque_pages_move_as_a_whole(source_tp: int, target_tp: int) -> None:
    def opaque(tp_size: int, seed: int) -> list[Caches]:
        ranks = side(GQA, "LBHNC", tp_size, seed)
        made = [
            make_caches(GQA, "LBHNC", 8, 4, tp=(rank, tp_size), format="vllm-cpu/vec/4")
            for rank in range(tp_size)
        ]
        for to, source in zip(made, ranks, strict=True):
            to.fill(source.stacked())
        return made

    sources, targets = opaque(source_tp, 1), opaque(target_tp, 2)
    geometry = targets[0].view.geometry
    assert (geometry.unit, geometry.plane_dims, geometry.format) == (4, (64,), "vllm-cpu/vec/4")
    assert geometry.token_bytes == make_caches(GQA, "LBHNC", 8, 4).view.geometry.token_bytes
    pull(targets, sources, (4, NUM_TOKENS))
    wanted, found = whole_prompt(sources, SOURCE_BLOCKS), whole_prompt(targets, TARGET_BLOCKS)
    assert (found[:, :, 4:] == wanted[:, :, 4:]).all()  # the last page moves as a whole
    assert not (found[:, :, :4] == wanted[:, :, :4]).any()


def test_pipeline_stages_hold_their_own_layers() -> None:
    stage = make_caches(GQA, "BLHNC", 8, 4, layers=range(1, 3))
    assert stage.view.shard == KVShard(1, 3, 0, 4)


def test_more_ranks_than_heads_hold_copies() -> None:
    views = [make_caches(GQA, "LBNHC", 2, 4, tp=(rank, 8)).view for rank in range(8)]
    assert [view.shard.head_start for view in views] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [(view.shard.replica, view.shard.replicas) for view in views[:2]] == [(0, 2), (1, 2)]


def test_kernel_blocks_may_divide_scheduler_blocks() -> None:
    view = make_caches(GQA, "LBHNC", 8, 4, num_pages=4).view
    assert (view.layout.block_size, view.blocks_per_page) == (4, 2)
    assert expand_blocks([3, 0], view.blocks_per_page) == [6, 7, 0, 1]
    assert expand_blocks([3, 0], 1) == [3, 0]


def refusal(layers: dict[str, torch.Tensor], model: ModelKV = GQA, **kwargs: Any) -> str:
    position = kwargs.pop("position", RankPosition(0, 1, "cpu"))
    with pytest.raises(UnsupportedByVllmConnector) as refused:
        view_caches(layers, model, position, kwargs.pop("num_blocks", 8), **kwargs)
    return str(refused.value)


def test_unsupported_memory_is_rejected_by_name() -> None:
    layers = make_caches(GQA, "LBHNC", 8, 4).layers
    first, second, _ = layers
    assert "wanted consecutive layers" in refusal({})
    gap = {name: layer for name, layer in layers.items() if name != second}
    assert "draft models and layers of several kinds" in refusal(gap)
    other = layers | {first: torch.zeros_like(layers[first])}
    assert "are in 2 allocations" in refusal(other)
    mixed = layers | {first: layers[first][:, :2]}
    assert "hybrid models" in refusal(mixed)
    assert "has layer 2 of a model of 2" in refusal(layers, replace(GQA, layers=2))
    assert "has 4 heads of KV" in refusal(layers, position=RankPosition(0, 2, "cpu"))
    assert "16 elements, the model's planes (8, 4)" in refusal(
        layers, replace(GQA, plane_dims=(8, 4))
    )
    assert "not [blocks, heads, tokens, content]" in refusal(layers, num_blocks=3)
    scattered = make_caches(GQA, "LBNHC", 8, 4).layers
    assert "an opaque page of 4 tokens has stride 64" in refusal(scattered, format="opaque")


@pytest.mark.parametrize(
    ("name", "index"), [("model.layers.3.self_attn.attn", 3), ("a.12", 12), ("h.0.attn", 0)]
)
def test_layer_number_is_parsed_from_name(name: str, index: int) -> None:
    assert layer_index(name) == index


@pytest.mark.parametrize("name", ["model.attn", "model.layers.3.experts.2.attn"])
def test_name_with_no_or_two_numbers_is_ambiguous(name: str) -> None:
    with pytest.raises(UnsupportedByVllmConnector, match="is ambiguous"):
        layer_index(name)
