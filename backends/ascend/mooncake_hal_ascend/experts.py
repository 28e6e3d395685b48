"""Mixture of experts: rows in the order of their experts, two grouped matrix products, and back."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def route_and_run(
    x: Tensor,  # [tokens, hidden]
    gate_up: Tensor,  # [experts, hidden, 2 * inner]
    down: Tensor,  # [experts, inner, hidden]
    expert_ids: Tensor,  # [tokens, chosen] int64
    expert_weights: Tensor,  # [tokens, chosen] float32
) -> Tensor:  # [tokens, hidden]
    """See ``Ops.moe``; the weights are rounded to x's type before the sum, which is float32."""
    if len(x) == 0:
        return torch.empty_like(x)
    num_experts = len(gate_up)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        expert_ids.int(),
        active_num=expert_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=-1,
    )
    inner = torch_npu.npu_swiglu(_grouped(rows, gate_up, counts))
    return torch_npu.npu_moe_token_unpermute(  # type: ignore[no-any-return]  # no types
        _grouped(inner, down, counts), places, probs=expert_weights.to(x.dtype)
    )


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows times its weights; ``counts`` says how many rows each has."""
    [found] = torch_npu.npu_grouped_matmul(
        [rows],
        [weights],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
    )
    return found  # type: ignore[no-any-return]  # torch_npu has no types
