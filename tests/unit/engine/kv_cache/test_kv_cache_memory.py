"""The KV cache: its tensors and its layout describe the same bytes; its size and layout choice."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.engine_plan import largest_block
from mooncake_engine.kv_cache.kv_cache_memory import (
    KVCacheMemory,
    KVCacheSize,
    choose_layout,
    choose_num_blocks,
)
from mooncake_hal.backend import Backend
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.registry import Registry

GEOMETRY = KVGeometry(AttentionKind.GQA, 3, 4, (8, 8), "float32", 4)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Registry.discover().select_backend("cpu")


@pytest.mark.parametrize("name", sorted(KV_LAYOUTS))
def test_element_addresses_follow_the_layout(name: str, backend: Backend) -> None:
    shard = shard_of(GEOMETRY, 2, 1)
    pool = KVCacheMemory(backend, 0, GEOMETRY, shard, KVCacheSize(5, 4), layout_name=name)
    seen = set()
    for plane in range(2):
        for layer in range(3):
            view = pool.layer(layer)[plane]
            assert view.shape == (5, 4, 2, 8)
            for block, token, head in ((0, 0, 0), (4, 3, 1), (2, 1, 1)):
                address = (
                    pool.layout.bases[plane][layer]
                    + block * pool.layout.block_strides[plane]
                    + token * pool.layout.token_strides[plane]
                    + head * pool.layout.head_strides[plane]
                )
                value = float(len(seen))
                view[block, token, head, 0] = value
                assert ctypes.c_float.from_address(address).value == value
                assert 0 <= address - pool.region.address < pool.region.nbytes
                seen.add(address)
    assert len(seen) == 18
    pool.close()


def test_num_blocks_follows_from_kv_cache_bytes() -> None:
    block_bytes = 3 * 2 * 16 * 2 * 8 * 4  # of ranks with 1, 1 and 2 heads
    config = EngineConfig(Path("x"), tp_size=3, kv_cache_bytes=10 * block_bytes + 1)
    assert largest_block(config, [GEOMETRY], 16) == block_bytes
    assert largest_block(config, [GEOMETRY, GEOMETRY], 16) == 2 * block_bytes
    assert choose_num_blocks(config, block_bytes) == 10
    small = EngineConfig(Path("x"), kv_cache_bytes=block_bytes - 1)
    with pytest.raises(ConfigError, match=f"one block takes {block_bytes} bytes"):
        choose_num_blocks(small, block_bytes)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        choose_num_blocks(EngineConfig(Path("x"), num_kv_blocks=0), block_bytes)


def test_layout_without_kernel_support_is_rejected() -> None:
    assert choose_layout(EngineConfig(Path("x")), ("LPBTH", "BHLPT")) == "LPBTH"
    with pytest.raises(ConfigError, match="support \\['LPBTH'\\]"):
        choose_layout(EngineConfig(Path("x"), kv_layout="BHLPT"), ("LPBTH",))


def test_close_is_idempotent(backend: Backend) -> None:
    pool = KVCacheMemory(
        backend, 0, GEOMETRY, shard_of(GEOMETRY, 1, 0), KVCacheSize(1, 4), layout_name="LPBHT"
    )
    assert torch.count_nonzero(pool.layer(0)[0]) == 0
    pool.close()
    pool.close()
