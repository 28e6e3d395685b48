"""Where KV lies in memory: one description for every layout.

A layout is an order of the five axes layer, plane, block, head and token, outermost first; the
elements of one token and head (``plane_dims[plane]``) are innermost and contiguous. Base
addresses per (plane, layer) and byte strides for block, head and token say the same to the
planner, and to the kernels as strided tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_hal.errors import CapabilityError
from mooncake_hal.kv.geometry import KVGeometry, KVShard

AXES = ("layer", "plane", "block", "head", "token")

KV_LAYOUTS: dict[str, tuple[str, ...]] = {
    # any head range of a block is one contiguous run: whole-request pulls, P_tp != D_tp
    "BHLPT": ("block", "head", "layer", "plane", "token"),
    # one layer of a block range is contiguous, heads before tokens: layerwise push
    "LPBHT": ("layer", "plane", "block", "head", "token"),
    # separate [blocks, tokens, heads, dim] tensors per layer and plane: what vendor ops take
    "LPBTH": ("layer", "plane", "block", "token", "head"),
}
"""Named axis orders, outermost first."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV memory of one rank.

    Args:
        name: key of KV_LAYOUTS.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        bases: [plane][layer] byte address of block 0, head 0, token 0.
        block_strides, head_strides, token_strides: [plane] bytes.
    """

    name: str
    num_blocks: int
    block_size: int
    bases: tuple[tuple[int, ...], ...]
    block_strides: tuple[int, ...]
    head_strides: tuple[int, ...]
    token_strides: tuple[int, ...]

    def shifted(self, address: int) -> KVLayout:
        """The same layout with every base moved up by ``address`` bytes."""
        bases = tuple(tuple(base + address for base in plane) for plane in self.bases)
        return KVLayout(
            self.name,
            self.num_blocks,
            self.block_size,
            bases,
            self.block_strides,
            self.head_strides,
            self.token_strides,
        )


def layout_bytes(geometry: KVGeometry, shard: KVShard, num_blocks: int, block_size: int) -> int:
    """Bytes that a rank's pool of blocks takes, in any layout."""
    per_piece = sum(geometry.plane_dims) * geometry.element_bytes
    return num_blocks * (block_size // geometry.unit) * shard.layers * shard.heads * per_piece


def make_layout(
    name: str, geometry: KVGeometry, shard: KVShard, num_blocks: int, block_size: int
) -> KVLayout:
    """Lay a rank's pool out in one allocation that begins at address 0; see ``KVLayout.shifted``.

    Planes of different width are laid out as if the plane axis held each at its own offset, so
    MLA's latent and rope share the formula with K and V. Where tokens lie in pieces
    (``KVGeometry.unit``), the token axis is one of pieces.

    Raises:
        CapabilityError: no layout of that name, or a block is not of whole pieces.
    """
    if block_size % geometry.unit:
        raise CapabilityError(
            f"blocks of {block_size} tokens are not of whole pieces of {geometry.unit}"
        )
    if name not in KV_LAYOUTS:
        raise CapabilityError(f"KV layout {name!r} is not known; known are {sorted(KV_LAYOUTS)}")
    order = KV_LAYOUTS[name]
    sizes = {
        "layer": shard.layers,
        "block": num_blocks,
        "head": shard.heads,
        "token": block_size // geometry.unit,
    }
    widths = [dim * geometry.element_bytes for dim in geometry.plane_dims]
    strides = [_axis_strides(order, sizes, widths, plane) for plane in range(len(widths))]
    bases = tuple(
        tuple(
            strides[plane]["plane"] + layer * strides[plane]["layer"]
            for layer in range(shard.layers)
        )
        for plane in range(len(widths))
    )
    return KVLayout(
        name,
        num_blocks,
        block_size,
        bases,
        tuple(stride["block"] for stride in strides),
        tuple(stride["head"] for stride in strides),
        tuple(stride["token"] for stride in strides),
    )


def _axis_strides(
    order: tuple[str, ...], sizes: dict[str, int], widths: list[int], plane: int
) -> dict[str, int]:
    """Byte strides of one plane; its ``"plane"`` entry is the plane's own offset."""
    strides: dict[str, int] = {}
    inside_own = widths[plane]  # below the plane axis only this plane's elements count
    inside_all = 0
    for axis in reversed(order):
        if axis == "plane":
            per_element = inside_own // widths[plane]
            strides["plane"] = per_element * sum(widths[:plane])
            inside_all = per_element * sum(widths)
        elif inside_all:
            strides[axis] = inside_all
            inside_all *= sizes[axis]
        else:
            strides[axis] = inside_own
            inside_own *= sizes[axis]
    return strides
