"""The suite's tests of row-wise ops: norms, rotation, gate and linear, compared with
``mooncake_hal.reference``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_data import Shape
from mooncake_hal.testing.backends_ops import DTYPES, assert_same, oracle, require, shape_for

DIMS = (16, 40, 64, 250, 768)
ROWS = (0, 1, 7, 130)


def random(backend: Backend, *shape: int, dtype: str, seed: int = 0) -> Tensor:
    """Standard normal values on the backend's device; skips the test if the backend does not
    support the dtype."""
    shaped = shape_for(backend, dtype)
    require(backend, shaped)
    return normal(backend, *shape, dtype=shaped.dtype, seed=seed)


def normal(backend: Backend, *shape: int, dtype: str = "float32", seed: int = 0) -> Tensor:
    """Standard normal values on the backend's device, of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    return values.to(Shape(dtype).torch_dtype).to(backend.runtime.device(0))


class RowsSuite:
    """Cases for the row-wise ops."""

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rms_norm(self, backend: Backend, dtype: str, dim: int, rows: int) -> None:
        """Odd widths and no rows at all."""
        x = random(backend, rows, dim, dtype=dtype)
        weight = random(backend, dim, dtype=dtype, seed=1)
        found = backend.ops.rms_norm(x, weight, 1e-5)
        assert_same(found, oracle.rms_norm(x, weight, 1e-5), dtype)

    def test_float16(self, backend: Backend) -> None:
        """All row-wise ops in float16, if the backend supports it."""
        x, residual = (random(backend, 9, 64, dtype="float16", seed=seed) for seed in (1, 2))
        weight = random(backend, 64, dtype="float16", seed=3)
        ops = backend.ops
        assert_same(ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), "float16")
        assert_same(ops.silu_mul(x), oracle.silu_mul(x), "float16")
        square = random(backend, 64, 64, dtype="float16", seed=4) / 8
        found = ops.linear(x, ops.pack_weight(square), weight)
        assert_same(found, oracle.linear(x, square, weight), "float16")
        wanted = oracle.add_rms_norm(x, residual, weight, 1e-5)
        for ours, theirs in zip(ops.add_rms_norm(x, residual, weight, 1e-5), wanted, strict=True):
            assert_same(ours, theirs, "float16")

    def test_rms_norm_over_heads_of_a_fused_projection(self, backend: Backend) -> None:
        """The input is a [tokens, heads, head_dim] view, as in models with norms of queries and
        keys."""
        dtype = shape_for(backend).dtype
        x = random(backend, 9, 12, 64, dtype=dtype)[:, 3:7]
        weight = random(backend, 64, dtype=dtype, seed=1)
        found = backend.ops.rms_norm(x, weight, 1e-6)
        assert_same(found, oracle.rms_norm(x, weight, 1e-6), dtype)

    def test_rms_norm_of_four_dimensions(self, backend: Backend) -> None:
        """Any number of outer dimensions."""
        dtype = shape_for(backend).dtype
        x = random(backend, 2, 3, 4, 32, dtype=dtype)
        weight = random(backend, 32, dtype=dtype, seed=1)
        found = backend.ops.rms_norm(x, weight, 1e-6)
        assert_same(found, oracle.rms_norm(x, weight, 1e-6), dtype)

    def test_rms_norm_keeps_its_input(self, backend: Backend) -> None:
        """Only add_rms_norm may reuse memory."""
        dtype = shape_for(backend).dtype
        x = random(backend, 5, 64, dtype=dtype)
        before = x.clone()
        backend.ops.rms_norm(x, random(backend, 64, dtype=dtype, seed=1), 1e-5)
        assert torch.equal(x, before)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_add_rms_norm(self, backend: Backend, dtype: str, dim: int, rows: int) -> None:
        """Norm of the sum, and the sum."""
        x, residual = (random(backend, rows, dim, dtype=dtype, seed=seed) for seed in (1, 2))
        weight = random(backend, dim, dtype=dtype, seed=3)
        wanted = oracle.add_rms_norm(x, residual, weight, 1e-5)
        found = backend.ops.add_rms_norm(x, residual, weight, 1e-5)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same(ours, theirs, dtype)

    @pytest.mark.parametrize("rotary_dim", [16, 64, 40])
    @pytest.mark.parametrize("tokens", ROWS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rope(self, backend: Backend, dtype: str, tokens: int, rotary_dim: int) -> None:
        """Views of a fused projection, positions in any order, part of the head rotated."""
        fused = random(backend, tokens, 12, 64, dtype=dtype)
        query, key = fused[:, :8], fused[:, 8:10]
        positions = (torch.arange(tokens) * 37 % 200).to(fused.device)
        cos_sin = normal(backend, 200, rotary_dim, seed=1)
        wanted = oracle.rope(query.clone(), key.clone(), positions, cos_sin)
        found = backend.ops.rope(query, key, positions, cos_sin)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same(ours, theirs, dtype)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_silu_mul(self, backend: Backend, dtype: str, dim: int, rows: int) -> None:
        """Large gates saturate and don't overflow."""
        x = random(backend, rows, 2 * dim, dtype=dtype)
        x[:, : dim // 2] *= 50
        assert_same(backend.ops.silu_mul(x), oracle.silu_mul(x), dtype)

    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("tokens", ROWS)
    @pytest.mark.parametrize("dims", [(64, 192), (250, 31), (768, 100)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_linear(
        self, backend: Backend, dtype: str, dims: tuple[int, int], tokens: int, has_bias: bool
    ) -> None:
        """A packed weight gives the plain one's result; odd widths, no tokens, strided rows."""
        fan_in, fan_out = dims
        x = random(backend, tokens, 2 * fan_in, dtype=dtype)[:, :fan_in]
        weight = random(backend, fan_out, fan_in, dtype=dtype, seed=1) * fan_in**-0.5
        bias = random(backend, fan_out, dtype=dtype, seed=2) if has_bias else None
        wanted = oracle.linear(x, weight, bias)
        found = backend.ops.linear(x, backend.ops.pack_weight(weight), bias)
        assert_same(found, wanted, dtype)
