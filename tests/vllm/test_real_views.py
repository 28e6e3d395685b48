"""vLLM's own views of KV memory, in all six layouts: the connector derives from them how to move
the right bytes.

Over real transports, between any two layouts and between tensor-parallel sizes.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.vllm_caches import ORDERS, Caches, make_caches
from support.vllm_instance import FakeRequest, FakeVllm, running
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from mooncake_hal.kv.geometry import AttentionKind, head_range
from mooncake_kv.config import KVTransferConfig
from mooncake_vllm.vllm_memory import ModelKV, RankPosition, view_caches

GQA = ModelKV(AttentionKind.GQA, 3, 4, (8, 8), "float32")
MLA = ModelKV(AttentionKind.MLA, 2, 1, (12, 4), "float32")
NUM_BLOCKS, BLOCK_SIZE = 8, 4
PROMPT = list(range(100, 114))
P_BLOCKS, D_BLOCKS = [5, 1, 4, 2], [3, 0, 6, 1]


def spec_of(model: ModelKV, heads: int, block_size: int) -> Any:
    """vLLM's description of a layer's KV."""
    if model.kind is AttentionKind.MLA:
        return MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
    size = model.plane_dims[0]
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=size, dtype=torch.float32
    )


def vllm_caches(
    model: ModelKV, order: str, tp: tuple[int, int] = (0, 1), kernel_block_size: int = BLOCK_SIZE
) -> Caches:
    """A rank's memory as vLLM allocates and views it."""
    start, stop = head_range(model.kv_heads, tp[1], tp[0])
    spec, layout = spec_of(model, stop - start, BLOCK_SIZE), KVCacheLayout[order]
    names = [f"model.layers.{number}.self_attn.attn" for number in range(model.layers)]
    strides = compute_layout_strides(spec, NUM_BLOCKS, model.layers, layout)
    size = model.layers * prod(compute_layer_kv_cache_shape_bytes(spec, NUM_BLOCKS))
    memory = KVCacheConfig(
        NUM_BLOCKS,
        [KVCacheTensor(size, names, strides[0], strides[1])],
        [KVCacheGroupSpec(names, spec)],
    )
    views = allocate_kv_cache(memory, torch.device("cpu"), layout, [kernel_block_size])
    view = view_caches(views, model, RankPosition(*tp, "cpu"), NUM_BLOCKS)
    return Caches(views, view)


def ranks(model: ModelKV, order: str, tp_size: int, seed: int) -> list[Caches]:
    """An instance's memory, filled with random values; all ranks hold the same latents."""
    made = [vllm_caches(model, order, (rank, tp_size)) for rank in range(tp_size)]
    noise = np.random.default_rng(seed)
    for rank in made:
        if model.kind is AttentionKind.MLA:
            noise = np.random.default_rng(seed)
        rank.fill(noise.random(rank.stacked().shape, dtype=np.float32))
    return made


def whole(instance: FakeVllm, blocks: list[int]) -> Any:
    """A prompt's KV gathered from all ranks: ``[layers, heads, tokens, content]``."""
    parts = [rank.stacked()[:, blocks] for rank in instance.caches]
    joined = np.concatenate(parts, axis=2).swapaxes(1, 2)
    layers, heads, num_blocks, tokens, content = joined.shape
    return joined.reshape(layers, heads, num_blocks * tokens, content)


def test_all_vllm_layouts_are_covered() -> None:
    assert {layout.name: layout.value for layout in KVCacheLayout} == ORDERS


@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("order", ORDERS)
def test_real_views_equal_those_of_unit_tests(order: str, model: ModelKV) -> None:
    real = vllm_caches(model, order)
    made = make_caches(model, order, NUM_BLOCKS, BLOCK_SIZE)
    for name, layer in real.layers.items():
        assert (layer.shape, layer.stride()) == (
            made.layers[name].shape,
            made.layers[name].stride(),
        )
    assert real.view.geometry == made.view.geometry
    assert real.view.shard == made.view.shard


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_kernel_blocks_may_be_smaller_than_scheduler_blocks(order: str) -> None:
    view = vllm_caches(GQA, order, kernel_block_size=2).view
    assert (view.blocks_per_page, view.layout.block_size) == (2, 2)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("order", ORDERS)
def test_complete_prompt_is_transferred(
    tmp_path: Path, order: str, prefill_tp: int, decode_tp: int, model: ModelKV, transport: str
) -> None:
    others = itertools.cycle(ORDERS)
    other = next(name for name in others if name == order)
    other = next(others)  # the next layout, so that every one is written and read
    config = KVTransferConfig(transports=(transport,), advertise_host="127.0.0.1")
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(running(name, tmp_path, memory, replace(config)))
            for name, memory in (
                ("p", ranks(model, order, prefill_tp, 1)),
                ("d", ranks(model, other, decode_tp, 2)),
            )
        )
        params = prefill.prefill(FakeRequest("p", PROMPT, {"do_remote_decode": True}), P_BLOCKS)
        request = FakeRequest("d", PROMPT, params)
        decode.scheduler.on_new_request(request)
        decode.admit(request, D_BLOCKS)
        decode.step_until(decode.reports.received, "d")
        prefill.step_until(prefill.reports.sent, "p")
        assert not decode.reports.failed
        found, wanted = whole(decode, D_BLOCKS), whole(prefill, P_BLOCKS)
        if model.kind is AttentionKind.MLA:  # every rank of D has the whole latent
            wanted = wanted[:, :1]
        assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()
