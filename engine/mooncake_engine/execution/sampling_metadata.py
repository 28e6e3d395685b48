"""Random numbers of requests, and the sampling parameters of a batch for a backend's sampling ops.

A random number depends only on the request's seed and the output position, by pure integer
arithmetic, so a request continues with the same numbers in another batch, on another instance or
on another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution.request_table import SamplingState
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import Backend, SamplingMetadata, SamplingOps
from mooncake_hal.backend_parts import to_device


class RandomStream(IntEnum):
    """The independent random numbers of one request at one output position."""

    CHOICE = 0
    """Chooses the token."""
    DRAFT = 1
    """Samples the draft token for the position."""
    TEST = 2
    """Decides whether the draft token is accepted."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
_SPREAD = 0xD1342543DE82EF95  # gives the streams distant seeds; times 0, it leaves CHOICE's as is


def uniform(seed: int, position: int, stream: RandomStream = RandomStream.CHOICE) -> float:
    """A number in [0, 1) with 52 random bits, so that its product with a positive float64 is always
    less than that float64.

    SplitMix64 (Steele, Lea, Flood 2014) as a hash: output ``position`` of the generator seeded with
    ``seed``. The seed is scrambled first, so that adjacent seeds yield unrelated numbers.

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
    """``uniform`` of the CHOICE stream, for many requests at once."""
    scrambled = _mix_all(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    steps = (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix_all(scrambled + steps) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix_all(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_MAX_INT32 = 2**31 - 1


def sampling_ops(backend: Backend) -> SamplingOps | None:
    """The backend's sampling ops; None if it has none, and torch samples."""
    return cast(SamplingOps, backend.ops) if backend.capabilities.sampling else None


def column(
    device: torch.device, values: Sequence[float], dtype: type[np.floating[Any]] = np.float32
) -> Tensor:
    """[values, 1] on a device; does not wait for the device."""
    return to_device(device, [np.array(values, dtype=dtype)])[0].unsqueeze(1)


class DeviceSampling:
    """Samples with a backend's sampling ops.

    The parameters of a request are copied to the device once. While the batch stays the same, a
    step copies nothing but its random numbers.

    Args:
        ops: the sampling ops of the device that holds the logits.
    """

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops
        self._batch: list[SamplingState] = []
        self._table = SamplingParameterTable()
        self._parameters: list[Tensor] = []

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Sample a token per row: [rows] int64.

        Args:
            logits: [rows, vocab] float32.
            states: the request of each row.
        """
        return self._ops.sample(logits, self.metadata(states, logits.device))

    def metadata(self, states: Sequence[SamplingState], device: torch.device) -> SamplingMetadata:
        """The parameters of these requests and the random numbers of their next tokens."""
        numbers = uniforms(
            [state.seed for state in states], [state.num_output_tokens for state in states]
        )
        if self._batch == states:  # the same objects in the same order
            [on_device] = to_device(device, [numbers])
        else:
            rows = np.array([state.row for state in states], dtype=np.int64)
            arrays = [numbers, rows, *self._table.take_changes(states)]
            on_device, of_batch, *changes = to_device(device, arrays)
            self._parameters = self._table.gather(of_batch, changes)
            self._batch = list(states)
        temperatures, top_ks, top_ps, min_ps = self._parameters
        return SamplingMetadata(temperatures, top_ks, top_ps, min_ps, on_device)


class SamplingParameterTable:
    """Temperature, top-k, top-p and min-p of all requests of a worker, by row, on the device.

    The parameters of each request are copied once, and those of a batch are gathered on the device.
    """

    def __init__(self) -> None:
        self._known: list[SamplingParams | None] = []  # by row: whose parameters the device has
        self._columns: list[Tensor] = []  # [rows] each

    def take_changes(self, states: Sequence[SamplingState]) -> list[NDArray[np.generic]]:
        """The rows whose parameters on the device are stale, and the current parameters, which the
        caller must pass to ``gather``. Each change is returned once; empty if there are none."""
        missing = max(state.row for state in states) + 1 - len(self._known)
        self._known += [None] * missing
        known, changed = self._known, []
        for state in states:
            if known[state.row] is not state.sampling:
                known[state.row] = state.sampling
                changed.append((state.row, state.sampling))
        if not changed:
            return []
        rows, params = zip(*changed, strict=True)
        return [np.array(rows, dtype=np.int64), *_parameters(params)]

    def gather(self, rows: Tensor, changes: Sequence[Tensor]) -> list[Tensor]:
        """Temperatures, top-k, top-p and min-p of some rows: [rows] each.

        Args:
            rows: [rows] int64, on the device.
            changes: the result of ``take_changes``, on the device.
        """
        if changes:
            changed, *values = changes
            self._grow(values)
            for on_device, new in zip(self._columns, values, strict=True):
                on_device.index_copy_(0, changed, new)
        return [each.index_select(0, rows) for each in self._columns]

    def _grow(self, values: Sequence[Tensor]) -> None:
        """Grow the columns to the number of known rows, with the types and device of ``values``."""
        columns = self._columns or [each[:0] for each in values]
        missing = len(self._known) - len(columns[0])
        if missing > 0:
            more = max(missing, len(columns[0]))
            self._columns = [torch.cat((each, each.new_zeros(more))) for each in columns]


def _parameters(params: Sequence[SamplingParams]) -> list[NDArray[np.generic]]:
    """Temperatures, top-k, top-p and min-p, as arrays."""
    return [
        np.array([each.temperature for each in params], dtype=np.float32),
        np.array([min(max(0, each.top_k), _MAX_INT32) for each in params], dtype=np.int32),
        np.array([each.top_p for each in params], dtype=np.float32),
        np.array([each.min_p for each in params], dtype=np.float32),
    ]
