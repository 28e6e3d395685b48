"""Drawing tokens on the device: nothing of it comes back to the host before the tokens do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_hal_cuda.kernels.draw_tokens import draw_tokens

_WIDTH = 512


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """How each row's token is drawn; all on the device, [rows].

    Args:
        temperatures: float32; 0 takes the largest logit.
        top_ks: int32; 0 is off.
        top_ps: float32; 1 is off. Counts within what top-k and min-p leave.
        min_ps: float32, of the largest probability; 0 is off.
        uniforms: float64 in [0, 1).
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    uniforms: Tensor


def draw(
    logits: Tensor,  # [rows, vocab] float32
    drawing: Drawing,
) -> Tensor:  # [rows] int64
    """Draw by the inverse of the cumulative distribution in token order; ties stay in together."""
    rows, vocab_size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        draw_tokens[(rows,)](
            tokens,
            logits,
            drawing.temperatures,
            drawing.top_ks,
            drawing.top_ps,
            drawing.min_ps,
            drawing.uniforms,
            vocab_size,
            logits.stride(0),
            WIDTH=_WIDTH,
            num_warps=8,
        )
    return tokens
