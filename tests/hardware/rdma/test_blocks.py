"""KV blocks that a backend wrote, planned and pulled by another process, compared byte for byte."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.kv_reader import GEOMETRY, KVTransferCase, Side, pull_elsewhere

from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize
from mooncake_hal.backend import Backend
from mooncake_hal.kv.geometry import shard_of
from mooncake_hal.registry import Registry
from mooncake_hal.testing.transports_buffers import load_transport
from mooncake_hal.testing.transports_peer import content
from mooncake_hal.transport import EndpointOptions, MemoryRegion

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LOADER = "mooncake_hal.transports.rdma.rdma_plugin:load"
NUM_TOKENS = 301
PREFILL_SEED = 99
CASES = [
    (Side(2, 32, 16, "BHLPT"), Side(1, 16, 40, "BHLPT")),
    (Side(1, 16, 32, "LPBTH"), Side(2, 16, 32, "BHLPT")),
    (Side(4, 16, 32, "BHLPT"), Side(3, 128, 4, "LPBHT")),
]
"""Prefill and decode sides; in the second case every span is one head of one token, 32 bytes."""


@pytest.fixture(scope="module")
def backend() -> Backend:
    """The CPU backend without kernels, which an emulated processor would compile for a minute."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MOONCAKE_HAL_CPU_NATIVE", "0")
        return Registry.discover().select_backend("cpu")


@pytest.mark.parametrize(("prefill", "decode"), CASES, ids=["2to1", "1to2", "4to3"])
def test_every_byte_arrives(backend: Backend, tmp_path: Path, prefill: Side, decode: Side) -> None:
    written = random_kv()
    prefill_blocks, decode_blocks = some_blocks(prefill, 1), some_blocks(decode, 2)
    with ExitStack() as stack:
        addresses, bases = [], []
        for rank in range(prefill.tp_size):
            pool = filled_pool(backend, prefill, rank, PREFILL_SEED)
            stack.callback(pool.close)
            write(backend, pool, prefill_blocks, written)
            endpoint = load_transport(LOADER).open(EndpointOptions(secret=b"secret"))
            stack.callback(endpoint.close)
            endpoint.register(pool.region)
            addresses.append(endpoint.address.hex())
            bases.append(pool.region.address)
        tokens = (0, NUM_TOKENS)
        found = pull_elsewhere(
            KVTransferCase(
                LOADER, prefill, decode, addresses, bases, prefill_blocks, decode_blocks, tokens
            ),
            tmp_path,
        )
    for rank, arrived in enumerate(found):
        pool = filled_pool(backend, decode, rank, rank)
        write(backend, pool, decode_blocks, written)
        assert (arrived == bytes_of(pool.region)).all(), f"rank {rank}"
        pool.close()


def random_kv() -> tuple[torch.Tensor, ...]:
    """K and V of a prompt, for every layer and head: [layers, tokens, heads, dim] each."""
    torch.manual_seed(5)
    shape = (GEOMETRY.layers, NUM_TOKENS, GEOMETRY.kv_heads, GEOMETRY.plane_dims[0])
    return tuple(torch.randn(shape).to(torch.bfloat16) for _ in range(GEOMETRY.planes))


def some_blocks(side: Side, seed: int) -> list[int]:
    """A shuffled block table."""
    needed = -(-NUM_TOKENS // side.block_size)
    blocks: list[int] = np.random.default_rng(seed).permutation(side.num_blocks).tolist()
    return blocks[:needed]


def filled_pool(backend: Backend, side: Side, rank: int, seed: int) -> KVCacheMemory:
    """A rank's pool, filled with the random bytes of ``seed``."""
    size = KVCacheSize(side.num_blocks, side.block_size)
    shard = shard_of(GEOMETRY, side.tp_size, rank)
    pool = KVCacheMemory(backend, 0, GEOMETRY, shard, size, layout_name=side.layout)
    bytes_of(pool.region)[:] = content(seed, side.pool_bytes(rank))
    return pool


def write(
    backend: Backend, pool: KVCacheMemory, blocks: list[int], written: tuple[torch.Tensor, ...]
) -> None:
    """Have the backend write the rank's part of a prompt's KV into its blocks."""
    tokens = torch.arange(NUM_TOKENS)
    slots = torch.tensor(blocks)[tokens // pool.block_size] * pool.block_size
    slots += tokens % pool.block_size
    heads = slice(pool.shard.head_start, pool.shard.head_stop)
    for layer in range(GEOMETRY.layers):
        key, value = (plane[layer][:, heads].contiguous() for plane in written)
        backend.ops.write_kv(key, value, *pool.layer(layer), slots)


def bytes_of(region: MemoryRegion) -> NDArray[np.uint8]:
    """A region's memory as an array, by its address."""
    memory: Any = (ctypes.c_uint8 * region.nbytes).from_address(region.address)
    return np.frombuffer(memory, np.uint8)
