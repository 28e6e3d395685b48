"""Mixture of experts: routing, grouped matrix products, and the way back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_npu._C._distributed_c10d import by_comm_name
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


_SIZES = {"A2": (16, 32, 64), "A3": (8, 16, 32, 64, 128, 144, 256, 288)}
_TOKENS, _CHOSEN = {"A2": 256, "A3": 512}, {"A2": 16, "A3": 8}


def _limits(ids: Tensor, hidden: int, ranks: int, num_experts: int, global_bs: int) -> int:
    """Tokens of a rank at most, for arguments that the documentation allows."""
    family = os.environ.get("NPU_EMULATION_GENERATION", "A2")
    tokens, chosen = ids.shape
    require(ids.dtype == torch.int32, f"expert_ids is int32, not {ids.dtype}")
    require(ranks in _SIZES[family], f"{family}: ep_world_size {ranks}")
    wide = hidden == 7168 if family == "A3" else hidden <= 7168 and hidden % 32 == 0
    require(wide, f"{family}: rows of {hidden}")
    require(num_experts % ranks == 0 and num_experts <= 512, f"{num_experts} experts")
    require(family == "A3" or num_experts // ranks <= 24, f"A2: {num_experts} experts")
    most = global_bs // ranks
    require(0 < tokens <= most <= _TOKENS[family] and global_bs % ranks == 0, f"{tokens} tokens")
    require(0 < chosen <= _CHOSEN[family], f"{family}: {chosen} experts per token")
    require(bool(((ids >= 0) & (ids < num_experts)).all()), "expert_ids are of experts")
    require(all(len(set(row)) == chosen for row in ids.tolist()), "a token's experts differ")
    return most


def _all(group: str, mine: Tensor, most: int) -> list[Tensor]:
    """Every rank's, padded with -1 to as many rows."""
    gloo = by_comm_name[group]
    padded = mine.new_full((most, *mine.shape[1:]), -1)
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(gloo.size())]
    gloo.allgather([parts], [padded]).wait()
    return parts


def _order(ids: list[Tensor], experts: range) -> list[tuple[int, int, int]]:
    """(expert, rank, token) of what a rank's experts get, in the order of its rows."""
    return [
        (expert, rank, token)
        for expert in experts
        for rank, of_rank in enumerate(ids)
        for token in (of_rank == expert).any(1).nonzero().flatten().tolist()
    ]


def _held(ids: list[Tensor], rank: int, ranks: int, num_experts: int) -> list[tuple[int, int, int]]:
    size = num_experts // ranks
    return _order(ids, range(rank * size, (rank + 1) * size))


@kernel("npu_moe_distribute_dispatch")
def distribute_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_scales: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **others: Any,
) -> tuple[Tensor, ...]:
    require(not any(others.values()), f"the emulation takes no {others}")
    require(expert_token_nums_type == 1, "tokens of experts are counted: type 1")
    require(shared_expert_num == 1, "shared_expert_num is 1")
    is_a2 = os.environ.get("NPU_EMULATION_GENERATION", "A2") == "A2"
    require(is_a2 == (expert_scales is not None), "expert_scales: on an A2, and there alone")
    most = _limits(expert_ids, x.shape[1], ep_world_size, moe_expert_num, global_bs)
    size = moe_expert_num // ep_world_size
    ids, rows = _all(group_ep, expert_ids, most), _all(group_ep, x, most)
    held = _held(ids, ep_rank_id, ep_world_size, moe_expert_num)
    room = global_bs * min(size, expert_ids.shape[1])
    expand_x = x.new_full((room, x.shape[1]), float("nan"))
    for row, (_, rank, token) in enumerate(held):
        expand_x[row] = rows[rank][token]
    first = ep_rank_id * size
    counts = torch.tensor([sum(one == first + e for one, *_ in held) for e in range(size)])
    places = torch.arange(expert_ids.numel(), dtype=torch.int32) + ep_rank_id
    by_rank = torch.full((ep_world_size * size,), ep_rank_id, dtype=torch.int32)
    empty = torch.empty(0)
    scales = torch.ones(room) if is_a2 else empty
    return expand_x, empty, places, counts, by_rank, torch.zeros(1, dtype=torch.int32), scales


@kernel("npu_moe_distribute_combine")
def distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
    **others: Any,
) -> Tensor:
    require(not any(others.values()), f"the emulation takes no {others}")
    require(expert_scales.dtype == torch.float32, "expert_scales is float32")
    is_a2 = os.environ.get("NPU_EMULATION_GENERATION", "A2") == "A2"
    require(is_a2 == (expand_scales is not None), "expand_scales: on an A2, and there alone")
    require(int(expand_idx[0]) == ep_rank_id, "expand_idx is what dispatch returned")
    require(int(ep_send_counts[0]) == ep_rank_id, "ep_send_counts is what dispatch returned")
    hidden = expand_x.shape[1]
    most = _limits(expert_ids, hidden, ep_world_size, moe_expert_num, global_bs)
    ids = _all(group_ep, expert_ids, most)
    outputs = _all(group_ep, expand_x, len(expand_x))
    total = torch.zeros(len(expert_ids), hidden)
    for owner, rows in enumerate(outputs):
        held = _held(ids, owner, ep_world_size, moe_expert_num)
        for row, (expert, rank, token) in enumerate(held):
            if rank == ep_rank_id:
                place = expert_ids[token].tolist().index(expert)
                total[token] += rows[row].float() * expert_scales[token, place]
    return total.to(expand_x.dtype)
