"""Memory layouts of paged KV: one description that covers all of them.

A layout is an order of the five axes layer, plane, block, head and token, outermost first; the
elements of one token and head (``plane_dims[plane]``) are innermost and contiguous. A layout is
expressed as base addresses per (plane, layer) and byte strides for block, head and token: the
transfer planner uses these numbers, and the kernels use strided tensors made from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_hal.errors import CapabilityError
from mooncake_hal.kv.geometry import KVGeometry, KVShard

AXES = ("layer", "plane", "block", "head", "token")

KV_LAYOUTS: dict[str, tuple[str, ...]] = {
    # any head range of a block is one contiguous run: for whole-request pulls with P_tp != D_tp
    "BHLPT": ("block", "head", "layer", "plane", "token"),
    # one layer of a block range is contiguous, heads before tokens: for layerwise push
    "LPBHT": ("layer", "plane", "block", "head", "token"),
    # a [blocks, tokens, heads, dim] tensor per layer and plane: the layout that vendor ops expect
    "LPBTH": ("layer", "plane", "block", "token", "head"),
}
"""Named axis orders, outermost first."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of one rank's KV cache.

    Args:
        name: key of KV_LAYOUTS.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        bases: [plane][layer] byte address of block 0, head 0, token 0.
        block_strides, head_strides, token_strides: [plane] strides in bytes.
    """

    name: str
    num_blocks: int
    block_size: int
    bases: tuple[tuple[int, ...], ...]
    block_strides: tuple[int, ...]
    head_strides: tuple[int, ...]
    token_strides: tuple[int, ...]

    def shifted(self, address: int) -> KVLayout:
        """Return the same layout with ``address`` added to every base."""
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
    """Size of a rank's KV cache in bytes; the same in every layout."""
    per_piece = sum(geometry.plane_dims) * geometry.element_bytes
    return num_blocks * (block_size // geometry.unit) * shard.layers * shard.heads * per_piece


def make_layout(
    name: str, geometry: KVGeometry, shard: KVShard, num_blocks: int, block_size: int
) -> KVLayout:
    """Lay out a rank's pool in one allocation at address 0; see ``KVLayout.shifted``.

    Each plane has its own offset on the plane axis, so that planes of different width (MLA's latent
    and rope) use the same formula as K and V. If several tokens form a unit (``KVGeometry.unit``),
    the token axis counts units.

    Raises:
        CapabilityError: the layout is unknown, or a block is not a whole number of units.
    """
    if block_size % geometry.unit:
        raise CapabilityError(
            f"blocks of {block_size} tokens are not a multiple of units of {geometry.unit} tokens"
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
    inside_own = widths[plane]  # axes inside the plane axis span only this plane's elements
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
