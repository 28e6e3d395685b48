"""Inputs of the backend suite: paged KV in a backend's own memory, and batches over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_hal.backend import Allocation, AttentionBatch, Backend
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import KVLayout, layout_bytes, make_layout

LAYERS = 2
"""Layers of a test cache; ops run on the last one, so that a wrong base address is detected."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters that vary between cases.

    Args:
        dtype: name of the element type.
        layout: name of the KV layout.
        heads, kv_heads, head_dim: sizes of the attention; for MLA, ``head_dim`` is the latent's
            width.
        block_size: tokens per block.
        rope_dim: width of MLA's second plane; 0 for grouped-query attention.
        kv_dtype: name of the cache's type; empty: the element type.
    """

    dtype: str = "float32"
    layout: str = "LPBHT"
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    rope_dim: int = 0
    kv_dtype: str = ""

    @property
    def plane_dims(self) -> tuple[int, int]:
        """Elements per token and head of both planes."""
        return self.head_dim, self.rope_dim or self.head_dim

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.head_dim + self.rope_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        return dtype_named(self.dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The element type of the cache."""
        return dtype_named(self.kv_dtype or self.dtype)


def device_indexes(backend: Backend) -> range:
    """The devices on which to try what depends on the index: the first two, or the only one."""
    return range(min(2, len(backend.runtime.devices())))


def dtype_named(name: str) -> torch.dtype:
    """Torch's dtype with that name."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


@dataclass(slots=True)
class PagedKV:
    """A KV cache in memory that the backend allocated.

    Args:
        key, value: views ``[num_blocks, block_size, kv_heads, dim]`` of the last layer; for MLA,
            latent and rope.
        allocation: the memory; call ``free`` at the end.
    """

    key: Tensor
    value: Tensor
    allocation: Allocation

    @classmethod
    def allocate(
        cls, backend: Backend, shape: Shape, num_blocks: int, *, is_sparse: bool = False
    ) -> PagedKV:
        """Allocate a cache filled with NaN, so that reads of unwritten slots are detected; with
        ``is_sparse``, it stays zero, so that pages which are not used take no memory."""
        dtype = shape.cache_dtype
        kind = AttentionKind.MLA if shape.rope_dim else AttentionKind.GQA
        geometry = KVGeometry(
            kind, LAYERS, shape.kv_heads, shape.plane_dims, str(dtype), dtype.itemsize
        )
        shard = shard_of(geometry, 1, 0)
        nbytes = layout_bytes(geometry, shard, num_blocks, shape.block_size)
        layout = make_layout(shape.layout, geometry, shard, num_blocks, shape.block_size)
        allocation = backend.memory.allocate(nbytes, 0)
        flat = allocation.tensor.view(dtype)
        if not is_sparse:
            flat.fill_(float("nan"))
        key, value = (plane_view(flat, layout, shape, plane) for plane in (0, 1))
        return cls(key, value, allocation)

    def free(self) -> None:
        """Drop the views and free the memory."""
        del self.key, self.value
        self.allocation.free()


def plane_view(flat: Tensor, layout: KVLayout, shape: Shape, plane: int) -> Tensor:
    """View of one plane's last layer in a flat tensor of the whole layout."""
    size = flat.element_size()
    strides = (
        layout.block_strides[plane] // size,
        layout.token_strides[plane] // size,
        layout.head_strides[plane] // size,
        1,
    )
    dims = (layout.num_blocks, layout.block_size, shape.kv_heads, shape.plane_dims[plane])
    return flat.as_strided(dims, strides, flat.storage_offset() + layout.bases[plane][-1] // size)


@dataclass(slots=True)
class Case:
    """A batch over a cache with random content."""

    shape: Shape
    kv: PagedKV
    batch: AttentionBatch
    query: Tensor  # [tokens, heads, query_dim]
    key: Tensor  # [tokens, kv_heads, dim], the new tokens' input of write_kv
    value: Tensor


def make_case(
    backend: Backend,
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    seed: int = 0,
    pool: int = 0,
) -> Case:
    """Create a random batch; every sequence has blocks of its own, in random order.

    Args:
        backend: the backend whose device and memory to use.
        shape: the parameters of the case.
        lengths: (query, context) tokens per sequence, decodes first.
        seed: seed of all random values.
        pool: number of blocks of a sparse pool, of which the batch has the last ones; 0: a pool
            that is just large enough.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // shape.block_size) for _, context in lengths]
    kv = PagedKV.allocate(backend, shape, pool or sum(counts) + 1, is_sparse=pool > 0)
    tables = _block_tables(counts, generator)
    if pool:
        tables += pool - sum(counts) - 1
    for row, (_, context) in enumerate(lengths):
        _fill(kv, shape, tables[row], context, generator)
    tokens = sum(query for query, _ in lengths)
    device = backend.runtime.device(0)

    def random(heads: int, dim: int) -> Tensor:
        values = torch.randn(tokens, heads, dim, generator=generator)
        return values.to(shape.torch_dtype).to(device)

    batch = _batch(shape, lengths, tables, device)
    query = random(shape.heads, shape.query_dim)
    key, value = (random(shape.kv_heads, dim) for dim in shape.plane_dims)
    return Case(shape, kv, batch, query, key, value)


def _block_tables(counts: Sequence[int], generator: torch.Generator) -> Tensor:
    order = torch.randperm(sum(counts) + 1, generator=generator)[: sum(counts)]
    tables = torch.zeros(len(counts), max(counts, default=1), dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count]
        start += count
    return tables


def _fill(
    kv: PagedKV, shape: Shape, table: Tensor, context: int, generator: torch.Generator
) -> None:
    """Write random keys and values for a sequence's tokens; the rest of its last block stays
    NaN."""
    for cache in (kv.key, kv.value):
        for start in range(0, context, shape.block_size):
            count = min(shape.block_size, context - start)
            block = int(table[start // shape.block_size])
            tokens = torch.randn(count, shape.kv_heads, cache.shape[-1], generator=generator)
            cache[block, :count] = tokens.to(cache.dtype).to(cache.device)


def _batch(
    shape: Shape, lengths: Sequence[tuple[int, int]], tables: Tensor, device: torch.device
) -> AttentionBatch:
    queries = [query for query, _ in lengths]
    starts = torch.tensor([0, *queries]).cumsum(0)
    slots = [
        int(tables[row, position // shape.block_size]) * shape.block_size
        + position % shape.block_size
        for row, (query, context) in enumerate(lengths)
        for position in range(context - query, context)
    ]
    decodes = next((i for i, query in enumerate(queries) if query != 1), len(queries))
    return AttentionBatch(
        num_decodes=decodes,
        query_start=starts.int().to(device),
        context_lens=torch.tensor([c for _, c in lengths], dtype=torch.int32).to(device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64).to(device),
        block_size=shape.block_size,
        host_query_lens=tuple(queries),
        host_context_lens=tuple(context for _, context in lengths),
    )
