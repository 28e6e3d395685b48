"""Expert parallelism over NPUs with torch-npu's fused dispatch and combine ops."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from mooncake_hal.collectives import GroupCommunicator
from mooncake_hal.fused_experts import ExpertShape
from mooncake_hal_ascend.ascend_ops import run_sorted
from mooncake_hal_ascend.soc import FusedExpertLimits

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def max_fused_tokens(
    limits: FusedExpertLimits, ranks: int, shape: ExpertShape, buffer_bytes: int
) -> int:
    """The maximum number of tokens per rank and call, or 0 if the ops can't be used; the reason is
    logged."""
    why = limits.unsupported_reason(ranks, shape)
    tokens = 0 if why else limits.max_tokens(ranks, shape, buffer_bytes)
    if not why and not tokens:
        why = f"HCCL_BUFFSIZE has {buffer_bytes // _MIB} MiB, too few for one token of each rank"
    if why:
        logger.warning(
            "tokens go to experts by all-to-all, as torch-npu's dispatch can't be used: %s", why
        )
    return tokens


@dataclass(frozen=True, slots=True, eq=False)
class AscendFusedExperts:
    """``FusedExperts`` with npu_moe_distribute_dispatch and npu_moe_distribute_combine.

    Args:
        group: communicator that no other op may use; see the ops' documentation.
        comm_name: HCCL's name of the group.
        shape: shape of the experts.
        max_tokens: maximum number of tokens per rank and call.
        has_expert_scales: whether dispatch and combine also transfer weights, as on an A2.
    """

    group: GroupCommunicator
    comm_name: str
    shape: ExpertShape
    max_tokens: int
    has_expert_scales: bool

    def run(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        slots: Tensor,
        weights: Tensor,
        *,
        max_tokens: int,
    ) -> Tensor:
        num_tokens = len(x)
        if num_tokens == 0:  # the ops require at least one token
            x = x.new_zeros(1, x.shape[1])
            slots = torch.arange(self.shape.chosen, device=x.device).unsqueeze(0)
            weights = weights.new_zeros(1, self.shape.chosen)
        ids, ranks = slots.int(), self.group.world_size
        rows, _, places, counts, ep_counts, tp_counts, scales = (
            torch_npu.npu_moe_distribute_dispatch(
                x,
                ids,
                self.comm_name,
                ranks,
                self.group.rank,
                self.shape.num_slots,
                expert_scales=weights if self.has_expert_scales else None,
                global_bs=max_tokens * ranks,
                expert_token_nums_type=1,
            )
        )
        total: Tensor = torch_npu.npu_moe_distribute_combine(
            run_sorted(rows, gate_up[0], down[0], counts),
            ids,
            places,
            ep_counts,
            weights,
            self.comm_name,
            ranks,
            self.group.rank,
            self.shape.num_slots,
            tp_send_counts=tp_counts,
            expand_scales=scales if self.has_expert_scales else None,
            global_bs=max_tokens * ranks,
        )
        return total[:num_tokens]

    def close(self) -> None:
        self.group.close()
