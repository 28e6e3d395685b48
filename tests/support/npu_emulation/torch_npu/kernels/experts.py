"""Mixture of experts: routing, grouped matrix products, unpermutation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_npu.kernels.registry import kernel, require


@kernel("npu_moe_init_routing_v2")
def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, chosen = expert_idx.shape
    require(expert_idx.dtype == torch.int32, f"expert_idx is int32, not {expert_idx.dtype}")
    require(drop_pad_mode == 0 and quant_mode == -1, "the emulation neither drops nor quantises")
    require(expert_tokens_num_type == 1 and expert_tokens_num_flag, "tokens are counted: type 1")
    require(active_num in (-1, 0, rows * chosen), "all rows are active")
    require(list(active_expert_range) == [0, expert_num], "all experts are active")
    require(row_idx_type == 0, "row indices are gather's: type 0")
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(flat, minlength=expert_num)
    return x[order // chosen], places.int(), counts, torch.empty(rows * chosen)


@kernel("npu_grouped_matmul", takes_nz=True)
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    require(not any(value for value in others.values()), f"the emulation takes no {others}")
    require((split_item, group_type, group_list_type) == (2, 0, 1), "rows grouped by counts only")
    [rows], [experts] = x, weight
    require(group_list is not None and group_list.dtype == torch.int64, "group_list is int64")
    require(len(group_list) == len(experts) > 1, "as many counts as experts, and several")
    require(rows.dtype == experts.dtype, f"x is {rows.dtype}, weight {experts.dtype}")
    require(rows.shape[1] == experts.shape[1], "weight is [experts, in, out]")
    counted = int(group_list.sum())
    require(counted <= len(rows), "counts add up to no more than the rows")
    parts = torch.split(rows[:counted], group_list.tolist())
    made = [part @ one for part, one in zip(parts, experts, strict=True)]
    behind = rows.new_full((len(rows) - counted, experts.shape[2]), float("nan"))
    return [torch.cat([*made, behind])]


@kernel("npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    require(not padded_mode, "padded_mode is False")
    require(sorted_indices.dtype in (torch.int32, torch.int64), "sorted_indices are integers")
    require(probs is not None and probs.dtype == permuted_tokens.dtype, "probs are of the tokens'")
    spread = permuted_tokens[sorted_indices.long()].unflatten(0, tuple(probs.shape))
    return (spread.float() * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)
