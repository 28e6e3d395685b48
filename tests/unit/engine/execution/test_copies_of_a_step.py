"""A step copies its arrays to the device at once, and a request's sampling parameters once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution import sampling_metadata
from mooncake_engine.execution.penalties import TokenCounts
from mooncake_engine.execution.request_table import BiasedTokens, GrammarState
from mooncake_engine.execution.sampling_metadata import DeviceSampling, uniform
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import SamplingMetadata
from mooncake_hal.backend_parts import copy_batched, to_device

CPU = torch.device("cpu")
Array = NDArray[Any]
ARRAYS = (
    np.arange(5, dtype=np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.array([2**40, -1], dtype=np.int64),
    np.array([0.5, 1e-3, 7.0], dtype=np.float32),
    np.array([1e-300], dtype=np.float64),
    np.zeros(0, dtype=np.int64),
    np.array([[True, False, True]]),
    np.array([[7, 255], [0, 1], [2, 3]], dtype=np.uint8),
)
"""Arrays of every type that is copied to devices."""


def test_arrays_that_are_copied_together_keep_their_values() -> None:
    for tensors in (copy_batched(CPU, ARRAYS, is_pinned=False), to_device(CPU, ARRAYS)):
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            assert tensor.shape == array.shape
            assert tensor.numpy().dtype == array.dtype
            assert np.array_equal(tensor.numpy(), array)


def test_each_array_is_aligned_like_an_allocation() -> None:
    first, *others = copy_batched(CPU, ARRAYS, is_pinned=False)
    storage = first.untyped_storage().data_ptr()
    for tensor in (first, *others):
        assert tensor.untyped_storage().data_ptr() == storage  # one buffer, hence one copy
        assert tensor.storage_offset() * tensor.element_size() % 256 == 0


@pytest.mark.parametrize("copy_arrays", [to_device, partial(copy_batched, is_pinned=False)])
def test_other_types_are_rejected_on_every_device(
    copy_arrays: Callable[[torch.device, list[Array]], list[Tensor]],
) -> None:
    """On the host as well, where torch would accept them: a test on a CPU detects them."""
    wrong = np.zeros((2, 3), dtype=np.int16)
    message = r"of shape \(2, 3\) has dtype int16, but only bool, .* can be copied .*: convert"
    with pytest.raises(TypeError, match=message):
        copy_arrays(CPU, [ARRAYS[0], wrong])


@dataclass(eq=False)
class State:
    row: int
    seed: int
    sampling: SamplingParams
    num_output_tokens: int = 0
    counts: TokenCounts | None = None
    grammar: GrammarState | None = None
    bias: BiasedTokens | None = None


@dataclass
class Recording:
    """A device's sampling that records its metadata."""

    given: list[SamplingMetadata] = field(default_factory=list)

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        self.given.append(metadata)
        return self.argmax(logits)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)


@dataclass
class Counting:
    """A stand-in for ``to_device`` that records the lengths of the arrays of each call."""

    lengths: list[list[int]] = field(default_factory=list)

    def __call__(self, device: torch.device, arrays: list[Array]) -> list[Tensor]:
        self.lengths.append([len(array) for array in arrays])
        return to_device(device, arrays)


def test_parameters_are_copied_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if rows are reused, and if the batch changes with each step."""
    copied, ops = Counting(), Recording()
    monkeypatch.setattr(sampling_metadata, "to_device", copied)
    sampling = DeviceSampling(ops)
    hot = State(1, 3, SamplingParams(temperature=0.5, top_k=20, top_p=0.9, min_p=0.1))
    greedy = State(0, -4, SamplingParams(temperature=0.0))
    for step in range(3):
        hot.num_output_tokens = greedy.num_output_tokens = step
        sampling.sample(torch.zeros(2, 8), [hot, greedy])
    sampling.sample(torch.zeros(2, 8), [greedy, hot])
    warm = State(0, 5, SamplingParams(temperature=0.75, top_k=-1))  # a finished request's row
    late = State(40, 6, SamplingParams(temperature=0.25, top_p=0.5))
    batch = [warm, hot, late]
    sampling.sample(torch.zeros(3, 8), batch)
    sampling.sample(torch.zeros(3, 8), batch)
    sampling.sample(torch.zeros(2, 8), batch[1:])
    # random numbers and rows, then those of new requests: rows and four parameters
    assert copied.lengths == [[2, 2, *[2] * 5], [2], [2], [2, 2], [3, 3, *[2] * 5], [3], [2, 2]]
    for step, metadata in enumerate(ops.given[:3]):
        assert metadata.temperatures.tolist() == [0.5, 0.0]
        assert metadata.top_ks.tolist() == [20, 0]
        assert metadata.uniforms.tolist() == [uniform(3, step), uniform(-4, step)]
    assert ops.given[3].temperatures.tolist() == [0.0, 0.5]
    for metadata, first in ((ops.given[4], 0), (ops.given[5], 0), (ops.given[6], 1)):
        assert metadata.temperatures.tolist() == [0.75, 0.5, 0.25][first:]
        assert metadata.top_ks.tolist() == [0, 20, 0][first:]
        assert metadata.top_ps.tolist() == pytest.approx([1.0, 0.9, 0.5][first:])
        assert metadata.min_ps.tolist() == pytest.approx([0.0, 0.1, 0.0][first:])
