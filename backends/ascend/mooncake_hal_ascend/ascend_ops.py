"""The ops of the Ascend backend: ``Ops`` with torch-npu's kernels."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import AttentionBatch
from mooncake_hal_ascend.ascend_latents import NZ, AscendLatentOps, angles_of, rotated, to_nz_blocks
from mooncake_hal_ascend.sequence_lengths import (
    SequenceLengths,
    causal_mask,
    decodes_of,
    prompts_of,
)
from mooncake_hal_ascend.soc import Soc

FORMAT_ND, FORMAT_NZ = 2, 29
"""ACL_FORMAT_FRACTAL_NZ."""
_TILE = 16
_DTYPES = (torch.bfloat16, torch.float16)


class AscendOps(AscendLatentOps):
    """``Ops`` with torch-npu's kernels. Caches are dense: ``[blocks, tokens, heads, dim]``.

    Args:
        soc: the devices' family.
    """

    def __init__(self, soc: Soc) -> None:
        super().__init__()
        self._soc = soc

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        torch_npu.npu_scatter_pa_kv_cache(
            key.contiguous(),
            value.contiguous(),
            key_cache,
            value_cache,
            slot_mapping,
            cache_mode="Norm",
        )

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        return attend(query, (key_cache, value_cache), decodes_of(batch), scale)

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        return attend(query, (key_cache, value_cache), prompts_of(batch), scale)

    def with_native_latents(self) -> AscendLatentOps:
        return AscendLatentOps(NZ)

    def convert_latents(self, cache: Tensor, block_ids: Tensor) -> None:
        to_nz_blocks(cache, block_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found, _ = torch_npu.npu_rms_norm(x, weight, epsilon=eps)
        return found  # type: ignore[no-any-return]  # torch_npu has no types

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        found, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
        return found, total

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys are concatenated, and rotated by one op."""
        rotary_dim, heads = cos_sin.shape[1], query.shape[1]
        rows = torch.cat((query, key), dim=1)
        rows[..., :rotary_dim] = rotated(rows[..., :rotary_dim], angles_of(positions, cos_sin))
        return rows[:, :heads], rows[:, heads:]

    def pack_weight(self, weight: Tensor) -> Tensor:
        return to_nz(weight) if self._soc.has_nz_weights else weight.contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def silu_mul(self, x: Tensor) -> Tensor:
        return torch_npu.npu_swiglu(x)  # type: ignore[no-any-return]  # torch_npu has no types

    def pack_experts(self, weights: Tensor) -> tuple[Tensor, ...]:
        """One tensor, [experts, in, out], as the grouped product expects it."""
        return (self.pack_weight(weights.transpose(1, 2)),)

    def unpack_experts(self, packed: tuple[Tensor, ...]) -> Tensor:
        rows: Tensor = torch_npu.npu_format_cast(packed[0], FORMAT_ND)
        return rows.transpose(1, 2).contiguous()

    def moe(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        return route_and_run(x, gate_up[0], down[0], expert_ids, expert_weights)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy blocks within a cache; no block may be both a source and a target."""
        cache.index_copy_(0, target, cache.index_select(0, source))

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        torch.index_select(cache, 0, block_ids, out=staging)

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        cache.index_copy_(0, block_ids, staging)


def route_and_run(
    x: Tensor,  # [tokens, hidden]
    gate_up: Tensor,  # [experts, hidden, 2 * inner]
    down: Tensor,  # [experts, inner, hidden]
    expert_ids: Tensor,  # [tokens, chosen] int64
    expert_weights: Tensor,  # [tokens, chosen] float32
) -> Tensor:  # [tokens, hidden]
    """Sort tokens by expert, run the experts, and sum their outputs.

    Expert weights are rounded to x's type before the sum, which is computed in float32.
    """
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
    return torch_npu.npu_moe_token_unpermute(  # type: ignore[no-any-return]  # no types
        run_sorted(rows, gate_up, down, counts), places, probs=expert_weights.to(x.dtype)
    )


def run_sorted(
    rows: Tensor,  # [any, hidden], sorted by expert
    gate_up: Tensor,  # [experts, hidden, 2 * inner]
    down: Tensor,  # [experts, inner, hidden]
    counts: Tensor,  # [experts] int64
) -> Tensor:  # [any, hidden]
    """Run each expert on its rows; results for rows behind the last expert's are undefined."""
    inner = torch_npu.npu_swiglu(_grouped(rows, gate_up, counts))
    return _grouped(inner, down, counts)


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its weights; ``counts`` is the number of rows per expert."""
    [found] = torch_npu.npu_grouped_matmul(
        [rows],
        [weights],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
    )
    return found  # type: ignore[no-any-return]  # torch_npu has no types


def to_nz(weight: Tensor) -> Tensor:
    """Convert a weight to NZ, unless its tiles would need padding or its type has no NZ format.

    The shape is unchanged. Only matrix products may read the result.
    """
    dense = weight.contiguous()
    is_whole = all(size % _TILE == 0 for size in weight.shape[-2:])
    if not is_whole or weight.dtype not in _DTYPES:
        return dense
    return torch_npu.npu_format_cast(dense, FORMAT_NZ)  # type: ignore[no-any-return]  # no types


def attend(
    query: Tensor,  # [tokens, heads, head_dim]
    caches: tuple[Tensor, Tensor],  # [blocks, tokens, kv heads, head_dim], dense
    sequences: SequenceLengths,
    scale: float,
) -> Tensor:
    """Causal attention of the sequences' new tokens; returns [tokens, heads, head_dim]."""
    if len(query) == 0:
        return torch.empty_like(query)
    key, value = caches
    found, _ = torch_npu.npu_fused_infer_attention_score(
        query.contiguous(),
        key.flatten(2),
        value.flatten(2),
        atten_mask=causal_mask(query.device),
        actual_seq_lengths=sequences.query_ends,
        actual_seq_lengths_kv=sequences.context_lens,
        block_table=sequences.block_table,
        num_heads=query.shape[1],
        scale=scale,
        input_layout="TND",
        num_key_value_heads=key.shape[2],
        sparse_mode=3,
        block_size=key.shape[1],
    )
    return found  # type: ignore[no-any-return]  # torch_npu has no types
