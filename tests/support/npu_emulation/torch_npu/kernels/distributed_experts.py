"""Experts on several NPUs: dispatch and combine of tokens over the emulated device's groups."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from torch_npu._C._distributed_c10d import by_comm_name
from torch_npu.kernels.registry import kernel, require

_SIZES = {"A2": (16, 32, 64), "A3": (8, 16, 32, 64, 128, 144, 256, 288)}
_TOKENS, _CHOSEN = {"A2": 256, "A3": 512}, {"A2": 16, "A3": 8}


def _limits(ids: Tensor, hidden: int, ranks: int, num_experts: int, global_bs: int) -> int:
    """Check the arguments against the documented limits; returns the maximum tokens per rank."""
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
    """Every rank's tensor, padded with -1 to the same number of rows."""
    gloo = by_comm_name[group]
    padded = mine.new_full((most, *mine.shape[1:]), -1)
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(gloo.size())]
    gloo.allgather([parts], [padded]).wait()
    return parts


def _order(ids: list[Tensor], experts: range) -> list[tuple[int, int, int]]:
    """(expert, rank, token) of a rank's rows, in order."""
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
