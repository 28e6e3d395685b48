"""Random numbers of requests, and the parameters that a device's own sampling takes.

The numbers depend on a request's seed and the output position, and on nothing else: pure integer
arithmetic, so that a request continues with the same ones in another batch, on another instance or
another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import cast

import torch
from torch import Tensor

from mooncake_engine.execution.request_table import SamplingState
from mooncake_hal.backend import Backend, SamplingMetadata, SamplingOps


class RandomStream(IntEnum):
    """Numbers that share nothing, of one request at one position."""

    CHOICE = 0
    """Chooses the token."""
    DRAFT = 1
    """Samples a draft token for it."""
    TEST = 2
    """Decides whether the draft token is kept."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
_SPREAD = 0xD1342543DE82EF95  # far apart seeds for the streams; 0 leaves the first one's alone


def uniform(seed: int, position: int, stream: RandomStream = RandomStream.CHOICE) -> float:
    """A number in [0, 1) with 52 random bits: a float64 times it is always less than the float64.

    SplitMix64 (Steele, Lea, Flood 2014) as a hash: output ``position`` of the stream ``seed``,
    the seed scrambled first so that neighbouring seeds share nothing.

    Args:
        seed: any integer; taken modulo 2**64.
        position: index of the output token, from 0.
        stream: what the number is for.
    """
    state = (_mix((seed ^ stream * _SPREAD) & _MASK) + (position + 1) * _GOLDEN) & _MASK
    return (_mix(state) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


_MAX_INT32 = 2**31 - 1


def sampling_ops(backend: Backend) -> SamplingOps | None:
    """The backend's sampling, or None where torch's is used."""
    return cast(SamplingOps, backend.ops) if backend.capabilities.sampling else None


def sample_on_device(ops: SamplingOps, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Sample a token per row: [rows] int64.

    Args:
        ops: of the device that holds the logits.
        logits: [rows, vocab] float32.
        states: the request of each row.
    """
    return ops.sample(logits, sampling_metadata(states, logits.device))


def sampling_metadata(states: Sequence[SamplingState], device: torch.device) -> SamplingMetadata:
    """How these requests' next tokens are sampled."""
    params = [state.sampling for state in states]
    knobs = torch.tensor(
        [[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float32
    ).T.contiguous()
    temperatures, top_ps, min_ps = knobs.to(device, non_blocking=True)
    top_ks = torch.tensor([min(max(0, p.top_k), _MAX_INT32) for p in params], dtype=torch.int32)
    numbers = [uniform(state.seed, state.num_output_tokens) for state in states]
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    return SamplingMetadata(
        temperatures,
        top_ks.to(device, non_blocking=True),
        top_ps,
        min_ps,
        uniforms.to(device, non_blocking=True),
    )
