"""Which linear layers run on our kernel: single rows with matching types and layouts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.kernels import gemv
from mooncake_hal_cuda.launch_tuning import Tuning

HOPPER = Tuning("sm_90", 132)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Record the shapes of the weights that our kernel receives."""
    given: list[Sequence[int]] = []

    def record(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        given.append(weight.shape)
        return x.new_zeros(1, len(weight))

    monkeypatch.setattr("mooncake_hal_cuda.cuda_ops.multiply_row", record)
    return given


@pytest.mark.parametrize("bias", [None, zeros(8)])
@pytest.mark.parametrize("rows", [zeros(1, 64), zeros(1, 128)[:, :64]])
def test_single_rows_run_on_our_kernel(
    chosen: list[Sequence[int]], rows: Tensor, bias: Tensor | None
) -> None:
    CudaOps(HOPPER).linear(rows, zeros(8, 64), bias)
    assert chosen == [(8, 64)]


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (zeros(1, 32), zeros(8, 64), None),
        (zeros(1, 64), zeros(8, 64, dtype=torch.float16), None),
        (zeros(1, 64), zeros(8, 64, dtype=torch.float32), None),
        (zeros(1, 64), zeros(8, 64), zeros(7)),
    ],
)
def test_mismatched_arguments_are_rejected(
    chosen: list[Sequence[int]], x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """As with any number of rows: a kernel would read beyond the arguments' memory."""
    with pytest.raises(RuntimeError):
        CudaOps(HOPPER).linear(x, weight, bias)
    assert not chosen


def test_other_layers_run_on_cublas(
    chosen: list[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = CudaOps(HOPPER)
    ops.linear(zeros(2, 64), zeros(8, 64), None)
    ops.linear(zeros(1, 64), zeros(64, 8).t(), None)
    ops.linear(zeros(1, 64), zeros(8, 64), zeros(16)[::2])
    CudaOps(Tuning("sm_100", 148)).linear(zeros(1, 64), zeros(8, 64), None)
    monkeypatch.setattr(gemv, "_MOST_WEIGHT_BYTES", 1023)
    ops.linear(zeros(1, 64), zeros(8, 64), None)
    assert not chosen
