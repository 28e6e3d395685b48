"""What every captured step reads, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_engine.execution.kv_pool import KVPool


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """The tokens of a step, and where their KV goes.

    Args:
        token_ids, positions, slots: [size] int64.
        scratch_slots: [any] int64, of blocks that no request ever has: for tokens made up.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    scratch_slots: Tensor

    @classmethod
    def of(cls, size: int, pool: KVPool) -> TokenInputs:
        """For that many tokens, all of them made up; the pool ends with scratch blocks."""
        device, end = pool.device, pool.layout.num_blocks * pool.block_size
        token_ids, positions = torch.zeros(2, size, dtype=torch.int64, device=device)
        scratch = torch.arange(pool.num_blocks * pool.block_size, end, device=device)
        slots = scratch.repeat(-(-size // len(scratch)))[:size]
        return cls(token_ids, positions, slots, scratch)

    def fill(self, token_ids: Tensor, positions: Tensor, slots: Tensor, size: int) -> None:
        """Take a step's tokens over, and make up what they are short of ``size``."""
        count = len(token_ids)
        self.token_ids[:count].copy_(token_ids)
        self.positions[:count].copy_(positions)
        self.slots[:count].copy_(slots)
        if count < size:
            self.slots[count:size].copy_(self.scratch_slots[: size - count])
