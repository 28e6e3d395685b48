"""Linear layers on fp8 weights, of the suite: against ``mooncake_hal.reference``."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from mooncake_hal.backend import Backend
from mooncake_hal.fp8_linear import FP8_BLOCK, Fp8LinearOps, Fp8Weight
from mooncake_hal.testing.backends_ops import DTYPES, assert_same, oracle
from mooncake_hal.testing.backends_rows import normal, random

SIZES = ((16, 16), (48, 80), (128, 256), (400, 272))
"""(out, in): within one block, of whole blocks, and of parts."""
ROWS = (0, 1, 7, 33, 130)


def require_fp8(backend: Backend) -> Fp8LinearOps:
    """The ops, or a skip."""
    if "fp8" not in backend.capabilities.quantization:
        pytest.skip(f"{backend.name} multiplies no fp8 weights here")
    return cast(Fp8LinearOps, backend.ops)


def make_weight(backend: Backend, size: tuple[int, int], *, is_blockwise: bool) -> Fp8Weight:
    """Random numbers, and scales that differ enough to be missed."""
    rows, columns = size
    values = normal(backend, *size, seed=1).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scales = normal(backend, *(blocks if is_blockwise else (rows,)), seed=2)
    return Fp8Weight(values, (scales.abs_() + 0.1) / (100 * columns**0.5))


class Fp8LinearSuite:
    """Cases for ``Fp8LinearOps``; the ``backend`` fixture comes from the concrete class."""

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
    @pytest.mark.parametrize("is_blockwise", [False, True], ids=["rows", "blocks"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fp8_linear(
        self, backend: Backend, dtype: str, is_blockwise: bool, size: tuple[int, int], rows: int
    ) -> None:
        """Scales of rows and of blocks, with a bias."""
        ops = require_fp8(backend)
        x, bias = (random(backend, *of, dtype=dtype) for of in ((rows, size[1]), size[:1]))
        weight = make_weight(backend, size, is_blockwise=is_blockwise)
        wanted = oracle.fp8_linear(x, weight, bias)
        found = ops.fp8_linear(x, ops.pack_fp8_weight(weight), bias)
        assert_same(found, wanted, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fp8_linear_with_a_scale_of_inputs(self, backend: Backend, dtype: str) -> None:
        """What is too large for it becomes the largest number, not NaN."""
        ops = require_fp8(backend)
        x = random(backend, 9, 80, dtype=dtype)
        x[0, 0], x[1, 1] = 1000, -1000
        plain = make_weight(backend, (48, 80), is_blockwise=False)
        scale = torch.tensor(0.01, device=x.device)
        weight = Fp8Weight(plain.values, plain.scales, scale)
        found = ops.fp8_linear(x, ops.pack_fp8_weight(weight), None)
        assert_same(found, oracle.fp8_linear(x, weight, None), dtype)

    @pytest.mark.parametrize("is_blockwise", [False, True], ids=["rows", "blocks"])
    def test_fp8_linear_of_strided_rows_and_zeros(
        self, backend: Backend, is_blockwise: bool
    ) -> None:
        """A part of a fused projection; a row of zeros has a result of zeros."""
        ops, dtype = require_fp8(backend), backend.capabilities.dtypes[0]
        x = random(backend, 9, 3 * 256, dtype=dtype)[:, 256:512]
        x[4] = 0
        weight = make_weight(backend, (128, 256), is_blockwise=is_blockwise)
        found = ops.fp8_linear(x, ops.pack_fp8_weight(weight), None)
        assert_same(found, oracle.fp8_linear(x, weight, None), dtype)
        assert not found[4].any()
