"""Drawing tokens on the device: nothing of it comes back to the host before the tokens do."""

from __future__ import annotations

import torch
from torch import Tensor

from mooncake_hal.backend import Drawing
from mooncake_hal_cuda.kernels.draw_tokens import draw_tokens

_WIDTH = 512


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
