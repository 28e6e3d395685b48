"""Derives a rank's geometry, shard and layout from vLLM-Ascend's KV cache tensors, a tuple per
layer.

vLLM-Ascend passes K and V, or latent and rope, as separate tensors: ``[blocks, tokens, heads,
dim]``, or heads before tokens if ``VLLM_KV_CACHE_LAYOUT`` is LBHNC. They may be in separate
allocations or share one. This holds for 0.30: see ``tests/contract/vllm_ascend``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mooncake_hal.kv.geometry import KVGeometry
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.transport import MemoryRegion
from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_memory import (
    CacheTensor,
    CacheView,
    ModelKV,
    RankPosition,
    row_of_layers,
    shard_of,
)

HEADS_FIRST = ("LBHNC", "HND")
"""Values of ``VLLM_KV_CACHE_LAYOUT`` with which heads come before tokens."""
NZ_FORMAT = 29
"""ACL_FORMAT_FRACTAL_NZ: tiles of 16 by 16 elements."""


def view_ascend_caches(
    caches: Mapping[str, Sequence[CacheTensor]],
    model: ModelKV,
    position: RankPosition,
    num_blocks: int,
    *,
    heads_first: bool = False,
) -> CacheView:
    """Describe a rank's memory.

    Args:
        caches: the tensors of each layer that the rank holds, by the layer's name.
        model: the model's KV.
        position: the rank's position.
        num_blocks: number of blocks that vLLM's scheduler counts.
        heads_first: whether heads come before tokens.

    Raises:
        UnsupportedByVllmConnector: the tensors are not the model's K and V.
    """
    start, layers = row_of_layers(caches)
    first = layers[0]
    kinds = {tuple((tuple(t.shape), tuple(t.stride())) for t in layer) for layer in layers}
    if len(kinds) > 1:
        raise UnsupportedByVllmConnector(
            f"the layers' KV caches have shapes and strides {sorted(kinds)}; wanted the same for "
            "all: KV of hybrid models can't be transferred yet"
        )
    _check_planes(first, model, num_blocks)
    token_axis, head_axis = (2, 1) if heads_first else (1, 2)
    blocks, tokens, heads = first[0].shape[0], first[0].shape[token_axis], first[0].shape[head_axis]
    shard = shard_of(model, position, range(start, start + len(layers)), heads)
    size = first[0].element_size()
    strides = [[stride * size for stride in plane.stride()] for plane in first]
    layout = KVLayout(
        "strided",
        num_blocks=blocks,
        block_size=tokens,
        bases=tuple(tuple(layer[p].data_ptr() for layer in layers) for p in range(len(first))),
        block_strides=tuple(plane[0] for plane in strides),
        head_strides=tuple(plane[head_axis] for plane in strides),
        token_strides=tuple(plane[token_axis] for plane in strides),
    )
    geometry = KVGeometry(
        model.kind, model.layers, model.kv_heads, model.plane_dims, model.dtype, size
    )
    regions = _regions((tensor for layer in layers for tensor in layer), position.device)
    return CacheView(geometry, shard, layout, regions, blocks // num_blocks)


def _check_planes(planes: Sequence[CacheTensor], model: ModelKV, num_blocks: int) -> None:
    """Check that there is one linear tensor for each of the model's planes, with equal numbers of
    blocks, tokens and heads."""
    shapes = [tuple(plane.shape) for plane in planes]
    if [shape[-1] for shape in shapes] != [*model.plane_dims] or {len(s) for s in shapes} != {4}:
        raise UnsupportedByVllmConnector(
            f"a layer's KV cache has tensors {shapes}, the model's planes are {model.plane_dims}: "
            "sparse attention's indexers, packed and quantised caches can't be transferred yet"
        )
    is_linear = all(plane.stride()[-1] == 1 for plane in planes)
    if len({shape[:3] for shape in shapes}) > 1 or shapes[0][0] % num_blocks or not is_linear:
        raise UnsupportedByVllmConnector(
            f"a layer's KV cache of shapes {shapes} and strides "
            f"{[tuple(plane.stride()) for plane in planes]} for {num_blocks} blocks is not "
            "[blocks, tokens, heads, dim] with the elements of a head in a row"
        )


def _regions(tensors: Iterable[CacheTensor], device: str) -> tuple[MemoryRegion, ...]:
    """The allocations of the tensors; adjacent ones are merged."""
    storages = {
        (storage.data_ptr(), storage.nbytes())
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(storages):
        if merged and merged[-1][1] == address:
            merged[-1] = merged[-1][0], address + nbytes
        else:
            merged.append((address, address + nbytes))
    return tuple(MemoryRegion(begin, end - begin, device) for begin, end in merged)


def check_ascend(additional_config: object, formats: Iterable[int]) -> None:
    """Refuse configurations and formats that store KV in tiles.

    Args:
        additional_config: ``additional_config`` of vLLM's configuration.
        formats: formats of the tensors, as ``torch_npu.get_npu_format`` returns them.

    Raises:
        UnsupportedByVllmConnector: names the option or format.
    """
    settings = additional_config if isinstance(additional_config, Mapping) else {}
    if settings.get("enable_kv_nz"):
        raise UnsupportedByVllmConnector(
            "enable_kv_nz stores the latents of a decode instance in tiles, those of a prefill "
            "instance never; leave it off"
        )
    if NZ_FORMAT in formats:
        raise UnsupportedByVllmConnector(
            "the KV cache has the format FRACTAL_NZ, whose tiles can't be transferred yet"
        )
