"""What vLLM's KV cache tensors say of a rank's memory: geometry, shard and layout, by strides.

Since 0.29 vLLM hands over one view ``[blocks, heads, tokens, content]`` per layer, all of them in
one allocation, in one of six orders in memory. Nothing here knows the orders: the strides say it.
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
"""What moves a device's memory, best first."""

LINEAR = "linear"
Cache = TypeVar("Cache")
"""A layer's: a tensor, or several."""


class Storage(Protocol):
    """What is read of a tensor's allocation."""

    def data_ptr(self) -> int:
        """Its first byte."""
        ...

    def nbytes(self) -> int:
        """Its length."""
        ...


class CacheTensor(Protocol):
    """What is read of a layer's KV cache, ``[blocks, heads, tokens, content]``."""

    @property
    def shape(self) -> Sequence[int]:
        """Numbers of blocks, heads, tokens and elements."""
        ...

    def stride(self) -> Sequence[int]:
        """Elements from one to the next, along each axis."""
        ...

    def data_ptr(self) -> int:
        """Address of block 0, head 0, token 0."""
        ...

    def element_size(self) -> int:
        """Bytes of an element."""
        ...

    def untyped_storage(self) -> Storage:
        """The allocation that it is a view of."""
        ...


@dataclass(frozen=True, slots=True)
class ModelKV:
    """What a model keeps of each token, whole.

    Args:
        kind: GQA or MLA.
        layers: decoder layers of the whole model.
        kv_heads: of the whole model; 1 for MLA.
        plane_dims: elements per token and head, of K and V or of latent and rope.
        dtype: name of the element type.
        groups: KV-cache groups, in vLLM's order; none where there is one.
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
        """As peers are told; arguments as in ``KVGeometry``."""
        return KVGeometry(
            self.kind,
            self.layers,
            self.kv_heads,
            dims,
            self.dtype,
            element_bytes,
            unit,
            format,
            self.groups,
        )


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Which rank this is.

    Args:
        tp_rank, tp_size: of its pipeline stage.
        device: where its memory is, such as ``"cuda:0"``.
    """

    tp_rank: int
    tp_size: int
    device: str


@dataclass(frozen=True, slots=True)
class CacheView:
    """What a rank's tensors turned out to be.

    Args:
        geometry, shard, layout, regions: as ``RankMemory`` takes them.
        blocks_per_page: blocks of the layout in one of the blocks that vLLM's scheduler counts.
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
        model: what a token's KV is.
        position: of the rank.
        num_blocks: that vLLM's scheduler counts.
        format: of a block's content, if it is not token after token; such a block is moved whole.

    Raises:
        UnsupportedByVllmConnector: the tensors are not such views, or of another shape than the
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
        blocks,
        tokens,
        tuple(tuple(tensor.data_ptr() + offset for tensor in tensors) for offset in offsets),
        (by_block,) * len(dims),
        (by_head,) * len(dims),
        (by_token * unit,) * len(dims),
    )
    storage = first.untyped_storage()
    region = MemoryRegion(storage.data_ptr(), storage.nbytes(), position.device)
    return CacheView(geometry, shard, layout, (region,), blocks // num_blocks)


def layer_index(name: str) -> int:
    """The number in a layer's name, such as 3 in ``model.layers.3.self_attn.attn``.

    Raises:
        UnsupportedByVllmConnector: there is none, or more than one.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", name)
    if len(numbers) != 1:
        raise UnsupportedByVllmConnector(
            f"which layer {name!r} is can't be told: wanted one number in it, found {numbers}"
        )
    return int(numbers[0])


def expand_blocks(pages: Sequence[int], blocks_per_page: int) -> list[int]:
    """The blocks of the layout that vLLM's blocks are made of, in order."""
    if blocks_per_page == 1:
        return list(pages)
    return [page * blocks_per_page + part for page in pages for part in range(blocks_per_page)]


def join_tables(tables: Sequence[Sequence[int]], blocks_per_page: int) -> list[int]:
    """A request's block table as ``KVGeometry.groups`` wants it, of vLLM's, one for each group.

    Raises:
        ValueError: they are not of one length.
    """
    expanded = [expand_blocks(table, blocks_per_page) for table in tables]
    if len(expanded) == 1:
        return expanded[0]
    return [block for row in zip(*expanded, strict=True) for block in row]


def row_of_layers(caches: Mapping[str, Cache]) -> tuple[int, list[Cache]]:
    """The first layer's number, and the caches in the order of their layers.

    Raises:
        UnsupportedByVllmConnector: they are not those of a row of layers, one each.
    """
    layers = {layer_index(name): tensor for name, tensor in caches.items()}
    order = sorted(layers)
    if not order or len(layers) != len(caches) or order != list(range(order[0], order[-1] + 1)):
        raise UnsupportedByVllmConnector(
            f"the KV cache has layers {sorted(caches)}: wanted one for each of a row of layers; "
            "draft models and layers of several kinds can't be handed over yet"
        )
    return order[0], [layers[index] for index in order]


def _check_alike(tensors: Sequence[CacheTensor]) -> None:
    kinds = {(tuple(tensor.shape), tuple(tensor.stride())) for tensor in tensors}
    if len(kinds) > 1 or any(len(shape) != 4 for shape, _ in kinds):
        raise UnsupportedByVllmConnector(
            f"the layers' KV caches have shapes and strides {sorted(kinds)}; wanted one of four "
            "axes for all: hybrid models can't be handed over yet"
        )
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) > 1:
        raise UnsupportedByVllmConnector(
            f"the layers' KV caches lie in {len(storages)} allocations, wanted one"
        )


def shard_of(model: ModelKV, position: RankPosition, layers: Sequence[int], heads: int) -> KVShard:
    """The part of the model's KV that a rank with these layers and so many heads holds.

    Raises:
        UnsupportedByVllmConnector: the model has no such part.
    """
    if layers[-1] >= model.layers:
        raise UnsupportedByVllmConnector(
            f"the KV cache has layer {layers[-1]} of a model of {model.layers}; the layers of "
            "draft models can't be handed over yet"
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
            "or quantised KV caches can't be handed over yet: use --kv-cache-dtype auto"
        )


def _check_dense_page(tensor: CacheTensor) -> None:
    """Tokens and content of a head must be one run, since nobody knows what lies where in it."""
    _, _, tokens, content = tensor.shape
    if tokens > 1 and tensor.stride()[2] != content:
        raise UnsupportedByVllmConnector(
            f"an opaque page of {tokens} tokens has stride {tensor.stride()[2]} between them, "
            f"wanted {content}"
        )
