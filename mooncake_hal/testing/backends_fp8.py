"""The suite's tests of linear layers and experts with fp8 weights, compared with
``mooncake_hal.reference``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.fp8_linear import FP8_BLOCK, Fp8ExpertOps, Fp8LinearOps, Fp8Weight
from mooncake_hal.testing.backends_ops import DTYPES, assert_same, oracle
from mooncake_hal.testing.backends_rows import normal, random

SIZES = ((16, 16), (48, 80), (128, 256), (400, 272))
"""(out, in): smaller than a block, multiples of a block, and neither."""
ROWS = (0, 1, 7, 33, 130)
EXPERT_SIZES = {False: (80, 48), True: (272, 128)}
"""(hidden, inner) of experts with row scales (False) and block scales (True)."""
LARGEST_PART = 2**-4
"""Largest relative difference of a row's norm: the change if every number between the two products
of experts is rounded to the next number of e4m3."""
KINDS = pytest.mark.parametrize("is_blockwise", [False, True], ids=["rows", "blocks"])


def require_fp8(backend: Backend) -> Fp8LinearOps:
    """Return the backend's fp8 linear ops, or skip the test."""
    if "fp8" not in backend.capabilities.quantization:
        pytest.skip(f"{backend.name} multiplies no fp8 weights here")
    return cast(Fp8LinearOps, backend.ops)


def require_fp8_experts(backend: Backend) -> Fp8ExpertOps:
    """Return the backend's fp8 expert ops, or skip the test."""
    if "fp8_experts" not in backend.capabilities.quantization:
        pytest.skip(f"{backend.name} multiplies no fp8 weights of experts here")
    return cast(Fp8ExpertOps, backend.ops)


def make_weight(
    backend: Backend, size: tuple[int, int], *, is_blockwise: bool, seed: int = 1
) -> Fp8Weight:
    """Create a weight of random values, with scales that differ enough for errors to be
    detected."""
    rows, columns = size
    values = normal(backend, *size, seed=seed).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scales = normal(backend, *(blocks if is_blockwise else (rows,)), seed=seed + 1)
    return Fp8Weight(values, (scales.abs_() + 0.1) / (100 * columns**0.5))


class Fp8LinearSuite:
    """Cases for ``Fp8LinearOps``; the ``backend`` fixture comes from the concrete class."""

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
    @KINDS
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fp8_linear(
        self, backend: Backend, dtype: str, is_blockwise: bool, size: tuple[int, int], rows: int
    ) -> None:
        """Row scales and block scales, with a bias."""
        ops = require_fp8(backend)
        x, bias = (random(backend, *of, dtype=dtype) for of in ((rows, size[1]), size[:1]))
        weight = make_weight(backend, size, is_blockwise=is_blockwise)
        wanted = oracle.fp8_linear(x, weight, bias)
        found = ops.fp8_linear(x, ops.pack_fp8_weight(weight), bias)
        assert_same(found, wanted, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fp8_linear_with_a_scale_of_inputs(self, backend: Backend, dtype: str) -> None:
        """Values that exceed the static scale saturate and do not become NaN."""
        ops = require_fp8(backend)
        x = random(backend, 9, 80, dtype=dtype)
        x[0, 0], x[1, 1] = 1000, -1000
        plain = make_weight(backend, (48, 80), is_blockwise=False)
        scale = torch.tensor(0.01, device=x.device)
        weight = Fp8Weight(plain.values, plain.scales, scale)
        found = ops.fp8_linear(x, ops.pack_fp8_weight(weight), None)
        assert_same(found, oracle.fp8_linear(x, weight, None), dtype)

    @KINDS
    def test_fp8_linear_of_strided_rows_and_zeros(
        self, backend: Backend, is_blockwise: bool
    ) -> None:
        """The input is a view of a fused projection; a row of zeros gives zeros."""
        ops, dtype = require_fp8(backend), backend.capabilities.dtypes[0]
        x = random(backend, 9, 3 * 256, dtype=dtype)[:, 256:512]
        x[4] = 0
        weight = make_weight(backend, (128, 256), is_blockwise=is_blockwise)
        found = ops.fp8_linear(x, ops.pack_fp8_weight(weight), None)
        assert_same(found, oracle.fp8_linear(x, weight, None), dtype)
        assert not found[4].any()


@dataclass(slots=True)
class Fp8ExpertsCase:
    """Tokens, experts, and the experts of each token; see ``Fp8ExpertOps.fp8_moe``."""

    x: Tensor
    gate_up: Fp8Weight
    down: Fp8Weight
    ids: Tensor
    weights: Tensor


def make_fp8_experts_case(
    backend: Backend, dtype: str, tokens: int, chosen: tuple[int, int], *, is_blockwise: bool
) -> Fp8ExpertsCase:
    """Create random tokens and experts; ``chosen`` is (number of experts, experts per token)."""
    hidden, inner = EXPERT_SIZES[is_blockwise]
    count, per_token = chosen

    def stacked(size: tuple[int, int], first_seed: int) -> Fp8Weight:
        each = [
            make_weight(backend, size, is_blockwise=is_blockwise, seed=first_seed + 2 * expert)
            for expert in range(count)
        ]
        values = torch.stack([weight.values.view(torch.uint8) for weight in each])
        scales = torch.stack([weight.scales for weight in each])
        return Fp8Weight(values.view(torch.float8_e4m3fn), scales)

    gate_up, down = stacked((2 * inner, hidden), 10), stacked((hidden, inner), 60)
    scores = normal(backend, tokens, count, seed=3).softmax(-1)
    weights, ids = scores.topk(per_token, dim=-1)
    x = random(backend, tokens, hidden, dtype=dtype)
    return Fp8ExpertsCase(x, gate_up, down, ids, weights)


class Fp8ExpertsSuite:
    """Cases for ``Fp8ExpertOps``."""

    def check_fp8_experts(self, backend: Backend, case: Fp8ExpertsCase, dtype: str) -> Tensor:
        """The outputs equal the reference's, and the input is unchanged."""
        ops, before = require_fp8_experts(backend), case.x.clone()
        packed = ops.pack_fp8_experts(case.gate_up), ops.pack_fp8_experts(case.down)
        found = ops.fp8_moe(case.x, *packed, case.ids, case.weights)
        plain = case.gate_up, case.down
        wanted = oracle.fp8_moe(before, *plain, case.ids, case.weights)
        assert torch.equal(case.x, before)
        if dtype == "float32":
            assert_same(found, wanted, dtype)
        else:  # a product that is rounded differently may become another number of e4m3
            apart, size = (found.float() - wanted.float()).norm(dim=-1), wanted.float().norm(dim=-1)
            assert (apart <= LARGEST_PART * size).all(), (apart / size).max()
        return found

    @pytest.mark.parametrize("chosen", [(4, 1), (8, 3), (3, 3)])
    @pytest.mark.parametrize("tokens", [0, 1, 7, 33])
    @KINDS
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_fp8_experts(
        self,
        backend: Backend,
        dtype: str,
        is_blockwise: bool,
        tokens: int,
        chosen: tuple[int, int],
    ) -> None:
        """One, several or all experts per token; also without tokens."""
        require_fp8_experts(backend)
        case = make_fp8_experts_case(backend, dtype, tokens, chosen, is_blockwise=is_blockwise)
        self.check_fp8_experts(backend, case, dtype)

    @KINDS
    def test_fp8_experts_where_all_choose_the_same(
        self, backend: Backend, is_blockwise: bool
    ) -> None:
        """Two experts have all tokens, one of which is zeros, and the others none."""
        require_fp8_experts(backend)
        dtype = backend.capabilities.dtypes[0]
        case = make_fp8_experts_case(backend, dtype, 70, (8, 2), is_blockwise=is_blockwise)
        case.ids = torch.tensor([5, 2]).to(case.ids.device).expand(70, 2).contiguous()
        case.x[4] = 0
        assert not self.check_fp8_experts(backend, case, dtype)[4].any()

    @KINDS
    def test_fp8_experts_of_a_token_do_not_depend_on_others(
        self, backend: Backend, is_blockwise: bool
    ) -> None:
        """A token's result does not depend on the other tokens: its scales are its own."""
        require_fp8_experts(backend)
        dtype = backend.capabilities.dtypes[0]
        case = make_fp8_experts_case(backend, dtype, 7, (4, 2), is_blockwise=is_blockwise)
        together = self.check_fp8_experts(backend, case, dtype)
        case.x, case.ids, case.weights = case.x[3:4], case.ids[3:4], case.weights[3:4]
        assert_same(self.check_fp8_experts(backend, case, dtype), together[3:4], dtype)

    @KINDS
    def test_unpacked_fp8_experts_equal_the_originals(
        self, backend: Backend, is_blockwise: bool
    ) -> None:
        """Unpacking restores the weights, and packing them again gives the same results."""
        ops, dtype = require_fp8_experts(backend), backend.capabilities.dtypes[0]
        case = make_fp8_experts_case(backend, dtype, 7, (4, 2), is_blockwise=is_blockwise)
        for name in ("gate_up", "down"):
            given = getattr(case, name)
            copied = Fp8Weight(given.values.clone(), given.scales.clone())
            unpacked = ops.unpack_fp8_experts(ops.pack_fp8_experts(copied))
            found, wanted = (each.values.view(torch.uint8) for each in (unpacked, given))
            assert torch.equal(found, wanted)
            assert torch.equal(unpacked.scales, given.scales)
            assert unpacked.values.is_contiguous()
            assert unpacked.scales.is_contiguous()
            setattr(case, name, unpacked)
        self.check_fp8_experts(backend, case, dtype)
