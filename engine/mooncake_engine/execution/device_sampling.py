"""Choosing tokens by the device's own sampling, for batches that ask for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from mooncake_engine.execution.randomness import uniform
from mooncake_engine.execution.request_state import SamplingState
from mooncake_hal.backend import Backend, Drawing, SamplingOps

_MAX_INT32 = 2**31 - 1


def sampling_ops(backend: Backend) -> SamplingOps | None:
    """The backend's sampling, or None where torch's is used."""
    return cast(SamplingOps, backend.ops) if backend.capabilities.sampling else None


def draw_on_device(ops: SamplingOps, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Draw a token per row: [rows] int64.

    Args:
        ops: of the device that holds the logits.
        logits: [rows, vocab] float32.
        states: the request of each row.
    """
    return ops.sample(logits, drawing_of(states, logits.device))


def drawing_of(states: Sequence[SamplingState], device: torch.device) -> Drawing:
    """How these requests draw their next tokens."""
    params = [state.sampling for state in states]
    knobs = torch.tensor(
        [[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float32
    ).T.contiguous()
    temperatures, top_ps, min_ps = knobs.to(device, non_blocking=True)
    top_ks = torch.tensor([min(max(0, p.top_k), _MAX_INT32) for p in params], dtype=torch.int32)
    numbers = [uniform(state.seed, state.num_output_tokens) for state in states]
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    return Drawing(
        temperatures,
        top_ks.to(device, non_blocking=True),
        top_ps,
        min_ps,
        uniforms.to(device, non_blocking=True),
    )
