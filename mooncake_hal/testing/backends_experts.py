"""The suite's tests of experts: ``moe``, compared with ``mooncake_hal.reference``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_ops import ALL_DTYPES, DTYPES, assert_same, oracle, shape_for
from mooncake_hal.testing.backends_rows import ROWS, normal, random


@dataclass(slots=True)
class ExpertsCase:
    """Tokens, experts, and the experts of each token.

    Args:
        x: [tokens, hidden].
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
        ids, weights: [tokens, chosen].
    """

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor


def make_experts_case(
    backend: Backend, dtype: str, tokens: int, experts: int, chosen: int, inner: int = 48
) -> ExpertsCase:
    """Create random tokens and experts; the hidden size is 64."""
    x = random(backend, tokens, 64, dtype=dtype)
    gate_up = random(backend, experts, 2 * inner, 64, dtype=dtype, seed=1) / 8
    down = random(backend, experts, 64, inner, dtype=dtype, seed=2) * inner**-0.5
    scores = normal(backend, tokens, experts, seed=3).softmax(-1)
    weights, ids = scores.topk(chosen, dim=-1)
    return ExpertsCase(x, gate_up, down, ids, weights)


class ExpertsSuite:
    """Cases for ``Ops.moe``."""

    def check(self, backend: Backend, case: ExpertsCase, dtype: str) -> None:
        """The outputs equal the reference's, and the input is unchanged."""
        before, ops = case.x.clone(), backend.ops
        packed = ops.pack_experts(case.gate_up), ops.pack_experts(case.down)
        found = ops.moe(case.x, *packed, case.ids, case.weights)
        plain = oracle.pack_experts(case.gate_up), oracle.pack_experts(case.down)
        assert_same(found, oracle.moe(before, *plain, case.ids, case.weights), dtype)
        assert torch.equal(case.x, before)

    @pytest.mark.parametrize("chosen", [(4, 1), (8, 2), (16, 8), (3, 3)])
    @pytest.mark.parametrize("tokens", ROWS)
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_moe(self, backend: Backend, dtype: str, tokens: int, chosen: tuple[int, int]) -> None:
        """One, several or all experts per token; also without tokens."""
        self.check(backend, make_experts_case(backend, dtype, tokens, *chosen), dtype)

    @pytest.mark.parametrize("inner", [16, 36, 96])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_moe_widths(self, backend: Backend, dtype: str, inner: int) -> None:
        """Inner sizes as they result from tensor parallelism."""
        self.check(backend, make_experts_case(backend, dtype, 9, 6, 2, inner), dtype)

    @pytest.mark.parametrize("inner", [36, 96])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_unpacked_experts_equal_the_originals(
        self, backend: Backend, dtype: str, inner: int
    ) -> None:
        """Unpacking restores the weights, and packing them again gives the same results."""
        case, ops = make_experts_case(backend, dtype, 9, 6, 2, inner), backend.ops
        for name in ("gate_up", "down"):
            given = getattr(case, name)
            unpacked = ops.unpack_experts(ops.pack_experts(given.clone()))
            assert torch.equal(unpacked, given)
            setattr(case, name, unpacked)
        self.check(backend, case, dtype)

    def test_moe_where_all_choose_the_same(self, backend: Backend) -> None:
        """Two experts have all tokens, the others none."""
        dtype = shape_for(backend).dtype
        case = make_experts_case(backend, dtype, 33, 8, 2)
        case.ids = torch.tensor([5, 2]).to(case.ids.device).expand(33, 2).contiguous()
        self.check(backend, case, dtype)
