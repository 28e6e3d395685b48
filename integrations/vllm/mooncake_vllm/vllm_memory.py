"""Derives a rank's geometry, shard and layout from the shapes and strides of vLLM's KV cache
tensors.

Since 0.29 vLLM passes one view ``[blocks, heads, tokens, content]`` per layer, all of them in one
allocation, in one of six memory orders. Nothing here depends on the order: the strides define it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, KVGroup, KVShard, head_range
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.transport import MemoryRegion
from mooncake_vllm.errors import UnsupportedByVllmConnector

TRANSPORTS = {
    "cpu": ("shm", "tcp", "rdma"),
    "cuda": ("cuda_ipc", "rdma", "staged"),
    "npu": ("hccs", "rdma", "staged"),
}
"""The transports that can move a device's memory, best first."""

LINEAR = "linear"
Cache = TypeVar("Cache")
"""The KV cache of a layer: a tensor, or several."""


class Storage(Protocol):
    """The part of a tensor's allocation that is used here."""

    def data_ptr(self) -> int:
        """Address of its first byte."""
        ...

    def nbytes(self) -> int:
        """Its length in bytes."""
        ...


class CacheTensor(Protocol):
    """The part of a layer's KV cache that is used here, ``[blocks, heads, tokens, content]``."""

    @property
    def shape(self) -> Sequence[int]:
        """Numbers of blocks, heads, tokens and elements."""
        ...

    def stride(self) -> Sequence[int]:
        """Distance between neighbours along each axis, in elements."""
        ...

    def data_ptr(self) -> int:
        """Address of block 0, head 0, token 0."""
        ...

    def element_size(self) -> int:
        """Bytes per element."""
        ...

    def untyped_storage(self) -> Storage:
        """The allocation that it is a view of."""
        ...


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The KV of a whole model, per token.

    Args:
        kind: GQA or MLA.
        layers: number of decoder layers of the whole model.
        kv_heads: number of KV heads of the whole model; 1 for MLA.
        plane_dims: elements per token and head, of K and V or of latent and rope.
        dtype: name of the element type.
        groups: KV-cache groups, in vLLM's order; empty if there is only one, without a window.
    """

    kind: AttentionKind
    layers: int
    kv_heads: int
    plane_dims: tuple[int, ...]
    dtype: str
    groups: tuple[KVGroup, ...] = ()

    def geometry(
        self, dims: tuple[int, ...], element_bytes: int, unit: int, format: str
    ) -> KVGeometry:
        """The geometry that is published to peers; arguments as in ``KVGeometry``."""
        return KVGeometry(
            self.kind,
            self.layers,
            self.kv_heads,
            plane_dims=dims,
            dtype=self.dtype,
            element_bytes=element_bytes,
            unit=unit,
            format=format,
            groups=self.groups,
        )


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of a rank in its instance.

    Args:
        tp_rank, tp_size: tensor-parallel rank and size in its pipeline stage.
        device: the device of its memory, such as ``"cuda:0"``.
    """

    tp_rank: int
    tp_size: int
    device: str


@dataclass(frozen=True, slots=True)
class CacheView:
    """The description of a rank's KV cache tensors.

    Args:
        geometry, shard, layout, regions: as in ``RankMemory``.
        blocks_per_page: blocks of the layout per block that vLLM's scheduler counts.
    """

    geometry: KVGeometry
    shard: KVShard
    layout: KVLayout
    regions: tuple[MemoryRegion, ...]
    blocks_per_page: int


def view_caches(
    caches: Mapping[str, CacheTensor],
    model: ModelKV,
    position: RankPosition,
    num_blocks: int,
    format: str = LINEAR,
) -> CacheView:
    """Describe a rank's memory.

    Args:
        caches: the tensor of each layer that the rank holds, by the layer's name.
        model: the model's KV.
        position: the rank's position.
        num_blocks: number of blocks that vLLM's scheduler counts.
        format: format of a block's content. Unless it is LINEAR, token after token, blocks are
            moved whole.

    Raises:
        UnsupportedByVllmConnector: the tensors are not such views, or do not have the shape of the
            model's KV.
    """
    start, tensors = row_of_layers(caches)
    _check_alike(tensors)
    first = tensors[0]
    blocks, heads, tokens, content = first.shape
    shard = shard_of(model, position, range(start, start + len(tensors)), heads)
    size = first.element_size()
    by_block, by_head, by_token, by_element = (stride * size for stride in first.stride())
    if by_element != size or blocks % num_blocks:
        raise UnsupportedByVllmConnector(
            f"a KV cache of shape {tuple(first.shape)} and strides {tuple(first.stride())} for "
            f"{num_blocks} blocks is not [blocks, heads, tokens, content] with content innermost"
        )
    if format == LINEAR:
        _check_content(model, content)
        dims, unit = model.plane_dims, 1
    else:
        dims, unit = (tokens * content,), tokens
        _check_dense_page(first)
    geometry = model.geometry(dims, size, unit, format)
    offsets = [sum(dims[:plane]) * size for plane in range(len(dims))]
    layout = KVLayout(
        "strided",
        num_blocks=blocks,
        block_size=tokens,
        bases=tuple(tuple(tensor.data_ptr() + offset for tensor in tensors) for offset in offsets),
        block_strides=(by_block,) * len(dims),
        head_strides=(by_head,) * len(dims),
        token_strides=(by_token * unit,) * len(dims),
    )
    storage = first.untyped_storage()
    region = MemoryRegion(storage.data_ptr(), storage.nbytes(), position.device)
    return CacheView(geometry, shard, layout, (region,), blocks // num_blocks)


def layer_index(name: str) -> int:
    """The number in a layer's name, such as 3 in ``model.layers.3.self_attn.attn``.

    Raises:
        UnsupportedByVllmConnector: the name has no number, or more than one.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", name)
    if len(numbers) != 1:
        raise UnsupportedByVllmConnector(
            f"the index of layer {name!r} is ambiguous: wanted one number in it, found {numbers}"
        )
    return int(numbers[0])


def expand_blocks(pages: Sequence[int], blocks_per_page: int) -> list[int]:
    """The blocks of the layout that make up vLLM's blocks, in order."""
    if blocks_per_page == 1:
        return list(pages)
    return [page * blocks_per_page + part for page in pages for part in range(blocks_per_page)]


def join_tables(tables: Sequence[Sequence[int]], blocks_per_page: int) -> list[int]:
    """Join a request's block tables, one per KV-cache group, into one as ``KVGeometry.groups``
    defines it.

    Raises:
        ValueError: the tables have different lengths.
    """
    expanded = [expand_blocks(table, blocks_per_page) for table in tables]
    if len(expanded) == 1:
        return expanded[0]
    return [block for row in zip(*expanded, strict=True) for block in row]


def row_of_layers(caches: Mapping[str, Cache]) -> tuple[int, list[Cache]]:
    """The first layer's number, and the caches in the order of their layers.

    Raises:
        UnsupportedByVllmConnector: the layers are not consecutive, or don't have one cache each.
    """
    layers = {layer_index(name): tensor for name, tensor in caches.items()}
    order = sorted(layers)
    if not order or len(layers) != len(caches) or order != list(range(order[0], order[-1] + 1)):
        raise UnsupportedByVllmConnector(
            f"the KV cache has layers {sorted(caches)}: wanted consecutive layers with one cache "
            "each; draft models and layers of several kinds can't be transferred yet"
        )
    return order[0], [layers[index] for index in order]


def _check_alike(tensors: Sequence[CacheTensor]) -> None:
    kinds = {(tuple(tensor.shape), tuple(tensor.stride())) for tensor in tensors}
    if len(kinds) > 1 or any(len(shape) != 4 for shape, _ in kinds):
        raise UnsupportedByVllmConnector(
            f"the layers' KV caches have shapes and strides {sorted(kinds)}; wanted one of four "
            "axes for all: KV of hybrid models can't be transferred yet"
        )
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) > 1:
        raise UnsupportedByVllmConnector(
            f"the layers' KV caches are in {len(storages)} allocations, wanted one"
        )


def shard_of(model: ModelKV, position: RankPosition, layers: Sequence[int], heads: int) -> KVShard:
    """The shard of a rank with these layers and this number of heads.

    Raises:
        UnsupportedByVllmConnector: the model has no such shard.
    """
    if layers[-1] >= model.layers:
        raise UnsupportedByVllmConnector(
            f"the KV cache has layer {layers[-1]} of a model of {model.layers}; the layers of "
            "draft models can't be transferred yet"
        )
    rank, size = position.tp_rank, position.tp_size
    start, stop = head_range(model.kv_heads, size, rank)
    if stop - start != heads:
        raise UnsupportedByVllmConnector(
            f"rank {rank} of {size} has {heads} heads of KV in its cache, the model's "
            f"{model.kv_heads} make {stop - start}"
        )
    sharing = [
        other for other in range(size) if head_range(model.kv_heads, size, other)[0] == start
    ]
    return KVShard(layers[0], layers[-1] + 1, start, stop, sharing.index(rank), len(sharing))


def _check_content(model: ModelKV, content: int) -> None:
    if content != sum(model.plane_dims):
        raise UnsupportedByVllmConnector(
            f"a token's KV has {content} elements, the model's planes {model.plane_dims}; packed "
            "or quantised KV caches can't be transferred yet: use --kv-cache-dtype auto"
        )


def _check_dense_page(tensor: CacheTensor) -> None:
    """Check that the tokens of a head are contiguous: an opaque page can only be moved whole."""
    _, _, tokens, content = tensor.shape
    if tokens > 1 and tensor.stride()[2] != content:
        raise UnsupportedByVllmConnector(
            f"an opaque page of {tokens} tokens has stride {tensor.stride()[2]} between them, "
            f"wanted {content}"
        )
