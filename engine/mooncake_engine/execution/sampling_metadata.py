"""Random numbers of requests, and the parameters that a device's own sampling takes.

The numbers depend on a request's seed and the output position, and on nothing else: pure integer
arithmetic, so that a request continues with the same ones in another batch, on another instance or
another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution.request_table import SamplingState
from mooncake_hal.backend import Backend, SamplingMetadata, SamplingOps
from mooncake_hal.backend_parts import to_device


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


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """``uniform`` of many choices at once."""
    scrambled = _mix_all(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    steps = (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix_all(scrambled + steps) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix_all(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_MAX_INT32 = 2**31 - 1


def sampling_ops(backend: Backend) -> SamplingOps | None:
    """The backend's sampling, or None where torch's is used."""
    return cast(SamplingOps, backend.ops) if backend.capabilities.sampling else None


class DeviceSampling:
    """Samples with a device's own ops. What the requests of a batch ask for stays on the device as
    long as the batch is the same, and only its random numbers are copied each step.

    Args:
        ops: of the device that holds the logits.
    """

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops
        self._batch: list[SamplingState] = []
        self._parameters: list[Tensor] = []

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Sample a token per row: [rows] int64.

        Args:
            logits: [rows, vocab] float32.
            states: the request of each row.
        """
        return self._ops.sample(logits, self.metadata(states, logits.device))

    def metadata(self, states: Sequence[SamplingState], device: torch.device) -> SamplingMetadata:
        """How these requests' next tokens are sampled."""
        numbers = uniforms(
            [state.seed for state in states], [state.num_output_tokens for state in states]
        )
        if self._batch == states:  # the very same objects, in this order
            [on_device] = to_device(device, [numbers])
        else:
            on_device, *self._parameters = to_device(device, [numbers, *_parameters(states)])
            self._batch = list(states)
        temperatures, top_ks, top_ps, min_ps = self._parameters
        return SamplingMetadata(temperatures, top_ks, top_ps, min_ps, on_device)


def _parameters(states: Sequence[SamplingState]) -> list[NDArray[np.generic]]:
    """Temperatures, top-k, top-p and min-p of a batch."""
    params = [state.sampling for state in states]
    return [
        np.array([each.temperature for each in params], dtype=np.float32),
        np.array([min(max(0, each.top_k), _MAX_INT32) for each in params], dtype=np.int32),
        np.array([each.top_p for each in params], dtype=np.float32),
        np.array([each.min_p for each in params], dtype=np.float32),
    ]
