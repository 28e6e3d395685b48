"""The arguments passed to torch for linear layers on fp8 weights. They meet the requirements of its
CUDA kernels, which is checked on a host, whose kernel accepts the same call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mooncake_hal.fp8_linear import Fp8Weight
from mooncake_hal.reference import dequantised
from mooncake_hal_cuda import fp8_launch


def make(rows: int, fan_in: int, fan_out: int) -> tuple[Tensor, Tensor, Fp8Weight]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, fan_in, generator=generator).to(torch.float8_e4m3fn)
    values = torch.randn(fan_out, fan_in, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(fan_out, generator=generator) + 0.5
    return x, torch.rand(rows, 1, generator=generator), Fp8Weight(values, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_call_meets_the_requirements_of_cuda(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int
) -> None:
    x, scales, weight = make(rows, 64, 48)
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
    kernel = torch._scaled_mm

    def watched(*args: Tensor, **options: Any) -> Tensor:
        calls.append((args, options))
        return kernel(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    bias = torch.arange(48).to(dtype)
    found = fp8_launch.multiply_rows(x, scales, fp8_launch.pack(weight), bias, dtype)

    ((left, right, *scaled), options) = calls[0]
    assert left.is_contiguous()
    assert right.t().is_contiguous()  # columns are dense
    assert left.shape[1] % 16 == right.shape[1] % 16 == 0
    assert all(scale.dtype is torch.float32 and scale.is_contiguous() for scale in scaled)
    shapes = [tuple(scale.shape) for scale in scaled]
    if dtype is torch.bfloat16:
        assert shapes == [(rows, 1), (1, 48)]
        assert options["out_dtype"] is torch.bfloat16  # the only type that supports scales per row
        assert options["bias"].dtype is torch.bfloat16
    else:
        assert shapes == [(), ()]
        assert options == {"out_dtype": torch.float32}  # float32 output supports no bias
    wanted = (x.float() * scales) @ dequantised(weight).T + bias.float()
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-3
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance * 4)


def test_float32_output_avoids_the_reduced_precision_of_tensor_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hopper's keep about 14 bits of a sum of e4m3 products: measured on an H200."""
    x, scales, weight = make(5, 64, 48)
    monkeypatch.delattr(torch, "_scaled_mm")
    bias = torch.arange(48.0)
    found = fp8_launch.multiply_rows(x, scales, fp8_launch.pack(weight), bias, torch.float32)
    wanted = (x.double() * scales) @ dequantised(weight).double().T + bias
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)


def test_packed_weights_are_dense_with_float32_scales() -> None:
    values = torch.zeros(64, 32).to(torch.float8_e4m3fn).t()
    packed = fp8_launch.pack(Fp8Weight(values, torch.ones(32, 2)[:, 0].bfloat16()))
    assert packed.values.is_contiguous()
    assert (packed.scales.dtype, packed.scales.is_contiguous()) == (torch.float32, True)
    assert packed.input_scale is None
