"""A step's arrays come to the device in one copy, and its sampling parameters once per batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from mooncake_engine.execution import sampling_metadata
from mooncake_engine.execution.penalties import TokenCounts
from mooncake_engine.execution.request_table import GrammarState
from mooncake_engine.execution.sampling_metadata import DeviceSampling, uniform
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import SamplingMetadata
from mooncake_hal.backend_parts import copy_at_once, to_device

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(5, dtype=np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.array([2**40, -1], dtype=np.int64),
    np.array([0.5, 1e-3, 7.0], dtype=np.float32),
    np.array([1e-300], dtype=np.float64),
    np.zeros(0, dtype=np.int64),
)


def test_arrays_behind_each_other_are_what_they_were() -> None:
    for tensors in (copy_at_once(CPU, ARRAYS, is_pinned=False), to_device(CPU, ARRAYS)):
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            assert tensor.shape == array.shape
            assert tensor.numpy().dtype == array.dtype
            assert np.array_equal(tensor.numpy(), array)


def test_each_begins_where_an_allocation_of_its_own_could() -> None:
    first, *others = copy_at_once(CPU, ARRAYS, is_pinned=False)
    storage = first.untyped_storage().data_ptr()
    for tensor in (first, *others):
        assert tensor.untyped_storage().data_ptr() == storage  # one buffer, hence one copy
        assert tensor.storage_offset() * tensor.element_size() % 256 == 0


@dataclass(eq=False)
class State:
    seed: int
    sampling: SamplingParams
    num_output_tokens: int = 0
    counts: TokenCounts | None = None
    grammar: GrammarState | None = None


@dataclass
class Recording:
    """A device's sampling that keeps what it is given."""

    given: list[SamplingMetadata] = field(default_factory=list)

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        self.given.append(metadata)
        return logits.argmax(dim=-1)


def test_parameters_are_copied_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def counting(device: torch.device, arrays: list[np.ndarray]) -> list[Tensor]:
        copied.append(len(arrays))
        return to_device(device, arrays)

    monkeypatch.setattr(sampling_metadata, "to_device", counting)
    ops = Recording()
    sampling = DeviceSampling(ops)
    logits = torch.zeros(2, 8)
    hot = State(3, SamplingParams(temperature=0.5, top_k=20, top_p=0.9, min_p=0.1))
    greedy = State(-4, SamplingParams(temperature=0.0))
    for step in range(3):
        hot.num_output_tokens = greedy.num_output_tokens = step
        sampling.sample(logits, [hot, greedy])
    sampling.sample(logits, [greedy, hot])
    assert copied == [5, 1, 1, 5]
    for step, metadata in enumerate(ops.given[:3]):
        assert metadata.temperatures.tolist() == [0.5, 0.0]
        assert metadata.top_ks.tolist() == [20, 0]
        assert metadata.uniforms.tolist() == [uniform(3, step), uniform(-4, step)]
    assert ops.given[3].temperatures.tolist() == [0.0, 0.5]
