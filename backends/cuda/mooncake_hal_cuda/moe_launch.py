"""Launches the mixture-of-experts kernels, without reading any length back to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_hal_cuda.kernels.moe_kernels import (
    combine_experts,
    count_pairs,
    group_pairs,
    grouped_matmul,
)
from mooncake_hal_cuda.launch_tuning import NEIGHBOURS, WIDTH, MatmulTile, power_of_two


@dataclass(frozen=True, slots=True)
class Grouping:
    """The (token, expert) pairs sorted by expert, in buffers that are sized for the worst case.

    Args:
        order: [tiles * rows] int32, indices of the pairs.
        tile_experts: [tiles] int32, expert of each tile, -1 for unused tiles.
        tile_rows: [tiles] int32, number of pairs in each tile.
        tile: launch parameters of the matrix products.
    """

    order: Tensor
    tile_experts: Tensor
    tile_rows: Tensor
    tile: MatmulTile


def group_by_expert(
    expert_ids: Tensor,  # [tokens, chosen] int64
    experts: int,
    tile: MatmulTile,
) -> Grouping:
    """Sort the pairs by expert; each expert's pairs begin at a tile boundary."""
    ids, pairs, device = expert_ids.contiguous(), expert_ids.numel(), expert_ids.device
    tiles = min(pairs, pairs // tile.rows + min(experts, pairs))
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    order = torch.empty(tiles * tile.rows, dtype=torch.int32, device=device)
    tile_experts = torch.full((tiles,), -1, dtype=torch.int32, device=device)
    tile_rows = torch.empty(tiles, dtype=torch.int32, device=device)
    count_pairs[(experts,)](counts, ids, pairs, WIDTH=WIDTH, num_warps=4)
    group_pairs[(experts,)](
        order,
        tile_experts,
        tile_rows,
        counts,
        ids,
        pairs,
        EXPERTS=experts,
        EXPERTS_PADDED=power_of_two(experts),
        ROWS=tile.rows,
        WIDTH=WIDTH,
        num_warps=4,
    )
    return Grouping(order, tile_experts, tile_rows, tile)


def multiply(
    x: Tensor,  # [pairs // per_row, in]
    weights: Tensor,  # [experts, out, in] dense
    grouping: Grouping,
    per_row: int,
    dtype: torch.dtype,
) -> Tensor:  # [pairs, out]
    """Multiply the row of each pair by the weights of the pair's expert."""
    _, fan_out, fan_in = weights.shape
    tile, tiles = grouping.tile, len(grouping.tile_experts)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((len(x) * per_row, fan_out), dtype=dtype, device=x.device)
    grouped_matmul[(tiles * -(-fan_out // tile.columns),)](
        out,
        x,
        weights,
        grouping.order,
        grouping.tile_experts,
        grouping.tile_rows,
        tiles,
        x.stride(0),
        IN=fan_in,
        OUT=fan_out,
        PER_ROW=per_row,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=NEIGHBOURS,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def combine(
    parts: Tensor,  # [tokens * chosen, dim] float32
    expert_weights: Tensor,  # [tokens, chosen] float32
    dtype: torch.dtype,
) -> Tensor:  # [tokens, dim]
    """Sum each token's expert outputs, weighted by ``expert_weights``."""
    tokens, chosen = expert_weights.shape
    dim = parts.shape[1]
    out = torch.empty((tokens, dim), dtype=dtype, device=parts.device)
    combine_experts[(tokens, -(-dim // WIDTH))](
        out, parts, expert_weights.contiguous(), CHOSEN=chosen, DIM=dim, WIDTH=WIDTH, num_warps=4
    )
    return out


def mean_rows(expert_ids: Tensor, experts: int) -> int:
    """The mean number of pairs per expert, rounded up."""
    return -(-expert_ids.numel() // experts)
