"""A prompt is transferred between vLLM's memory and that of our engine, by one connector over real
sockets.

Our engine's memory is laid out by ``KV_LAYOUTS``, in blocks of another size. Packed pages are
rejected by name.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.vllm_caches import Caches, RankCaches, make_caches, whole_prompt
from support.vllm_instance import FakeRequest, FakeVllm, running

from mooncake_hal.kv.geometry import AttentionKind, KVShard, head_range
from mooncake_hal.kv.layout import KV_LAYOUTS, layout_bytes, make_layout
from mooncake_hal.transport import MemoryRegion
from mooncake_kv.config import KVTransferConfig
from mooncake_vllm.vllm_memory import CacheView, ModelKV

MODEL = ModelKV(AttentionKind.GQA, 2, 4, (8, 8), "float32")
CONFIG = KVTransferConfig(transports=("tcp",), advertise_host="127.0.0.1")
PROMPT = list(range(100, 114))
VLLM_BLOCKS, ENGINE_BLOCKS = [5, 1, 4, 2], [3, 6]
ENGINE_BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True)
class EngineCaches:
    """A rank's KV cache of our own engine.

    Args:
        memory: the whole pool.
        view: the pool as passed to the connector.
        layers: the layer names with which vLLM's steps would call hooks.
    """

    memory: Any
    view: CacheView
    layers: dict[str, object]

    def stacked(self) -> Any:
        """A copy of all memory: ``[layers, blocks, heads, tokens, content]``."""
        layout, shard = self.view.layout, self.view.shard
        planes = []
        for plane, width in enumerate(self.view.geometry.plane_dims):
            strides = (
                layout.block_strides[plane],
                layout.head_strides[plane],
                layout.token_strides[plane],
                4,
            )
            shape = (layout.num_blocks, shard.heads, layout.block_size, width)
            start = self.memory.ctypes.data
            planes.append(
                np.stack(
                    [
                        np.lib.stride_tricks.as_strided(
                            self.memory[(base - start) // 4 :], shape, strides
                        ).copy()
                        for base in layout.bases[plane]
                    ]
                )
            )
        return np.concatenate(planes, axis=-1)


def engine_caches(name: str, tp: tuple[int, int]) -> EngineCaches:
    geometry = make_caches(MODEL, "LBHNC", 2, 4).view.geometry
    start, stop = head_range(MODEL.kv_heads, tp[1], tp[0])
    shard = KVShard(0, MODEL.layers, start, stop)
    nbytes = layout_bytes(geometry, shard, 8, ENGINE_BLOCK_SIZE)
    memory = np.random.default_rng(tp[0]).random(nbytes // 4, dtype=np.float32)
    layout = make_layout(name, geometry, shard, 8, ENGINE_BLOCK_SIZE).shifted(memory.ctypes.data)
    region = MemoryRegion(memory.ctypes.data, nbytes)
    return EngineCaches(memory, CacheView(geometry, shard, layout, (region,), 1), {})


def vllm_caches(order: str, tp: tuple[int, int], **kwargs: Any) -> Caches:
    made = make_caches(MODEL, order, 8, 4, tp=tp, **kwargs)
    made.fill(np.random.default_rng(7 + tp[0]).random(made.stacked().shape, dtype=np.float32))
    return made


def transfer(
    folder: Path,
    sources: list[Any],
    targets: list[Any],
    source_blocks: list[int],
    target_blocks: list[int],
) -> FakeVllm:
    """Transfer a prompt from one instance's memory into another's; returns the second one."""
    with ExitStack() as stack:
        prefill = stack.enter_context(running("p", folder, sources, CONFIG))
        decode = stack.enter_context(running("d", folder, targets, CONFIG))
        params = prefill.prefill(
            FakeRequest("p", PROMPT, {"do_remote_decode": True}), source_blocks
        )
        request = FakeRequest("d", PROMPT, params)
        decode.scheduler.on_new_request(request)
        decode.admit(request, target_blocks)
        decode.step_until(decode.reports.received, "d")
        return decode


def tokens_of(ranks: list[RankCaches], blocks: list[int]) -> Any:
    return whole_prompt(ranks, blocks)[:, :, : len(PROMPT)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("layout", KV_LAYOUTS)
@pytest.mark.parametrize("is_vllm_first", [True, False], ids=["from vllm", "to vllm"])
def test_linear_memory_is_transferred_both_ways(
    tmp_path: Path, is_vllm_first: bool, layout: str, prefill_tp: int, decode_tp: int
) -> None:
    def of_vllm(size: int) -> list[Any]:
        return [vllm_caches("LBNHC", (rank, size)) for rank in range(size)]

    def of_engine(size: int) -> list[Any]:
        return [engine_caches(layout, (rank, size)) for rank in range(size)]

    if is_vllm_first:
        sources, targets = of_vllm(prefill_tp), of_engine(decode_tp)
        blocks = VLLM_BLOCKS, ENGINE_BLOCKS
    else:
        sources, targets = of_engine(prefill_tp), of_vllm(decode_tp)
        blocks = ENGINE_BLOCKS, VLLM_BLOCKS
    decode = transfer(tmp_path, sources, targets, *blocks)
    assert not decode.reports.failed
    assert (tokens_of(targets, blocks[1]) == tokens_of(sources, blocks[0])).all()


def test_packed_pages_are_rejected_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed = [vllm_caches("LBHNC", (0, 1), format="vllm-cpu/amx/4")]
    plain: list[Any] = [engine_caches("LPBHT", (0, 1))]
    decode = transfer(tmp_path, packed, plain, VLLM_BLOCKS, ENGINE_BLOCKS)
    assert decode.reports.failed == {"d"}
    assert "vllm-cpu/amx/4" in caplog.text
    assert "linear" in caplog.text
