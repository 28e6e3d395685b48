"""The ops of the Ascend backend: ``Ops`` over torch-npu's kernels."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import AttentionBatch
from mooncake_hal_ascend.attention import attend
from mooncake_hal_ascend.experts import route_and_run
from mooncake_hal_ascend.latent import NZ, Latents, to_nz_blocks
from mooncake_hal_ascend.rotation import angles_of, rotated
from mooncake_hal_ascend.sequences import decodes_of, prompts_of
from mooncake_hal_ascend.soc import Soc
from mooncake_hal_ascend.weights import to_nz


class AscendOps(Latents):
    """See ``Ops``. Caches are dense: ``[blocks, tokens, heads, dim]``.

    Args:
        soc: what the devices are.
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
        """See ``Ops``."""
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
        """See ``Ops``."""
        return attend(query, (key_cache, value_cache), decodes_of(batch), scale)

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """See ``Ops``."""
        return attend(query, (key_cache, value_cache), prompts_of(batch), scale)

    def with_resident_latents(self) -> Latents:
        """See ``ResidentLatentOps``."""
        return Latents(NZ)

    def make_resident(self, cache: Tensor, block_ids: Tensor) -> None:
        """See ``ResidentLatentOps``."""
        to_nz_blocks(cache, block_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops``."""
        found, _ = torch_npu.npu_rms_norm(x, weight, epsilon=eps)
        return found  # type: ignore[no-any-return]  # torch_npu has no types

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Ops``."""
        found, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
        return found, total

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Ops``. Queries and keys go through one op."""
        rotary_dim, heads = cos_sin.shape[1], query.shape[1]
        rows = torch.cat((query, key), dim=1)
        rows[..., :rotary_dim] = rotated(rows[..., :rotary_dim], angles_of(positions, cos_sin))
        return rows[:, :heads], rows[:, heads:]

    def pack_weight(self, weight: Tensor) -> Tensor:
        """See ``Ops``."""
        return to_nz(weight) if self._soc.has_nz_weights else weight.contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Ops``."""
        return functional.linear(x, weight, bias)

    def silu_mul(self, x: Tensor) -> Tensor:
        """See ``Ops``."""
        return torch_npu.npu_swiglu(x)  # type: ignore[no-any-return]  # torch_npu has no types

    def pack_experts(self, weights: Tensor) -> tuple[Tensor, ...]:
        """See ``Ops``. One tensor, [experts, in, out], as the grouped product takes it."""
        return (self.pack_weight(weights.transpose(1, 2)),)

    def moe(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        """See ``Ops``."""
        return route_and_run(x, gate_up[0], down[0], expert_ids, expert_weights)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """See ``Ops``. No block may be both a source and a target."""
        cache.index_copy_(0, target, cache.index_select(0, source))

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        """See ``Ops``."""
        torch.index_select(cache, 0, block_ids, out=staging)

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        """See ``Ops``."""
        cache.index_copy_(0, block_ids, staging)
