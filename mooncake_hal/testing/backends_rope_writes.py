"""The suite's tests of fused norms, rotation and KV writes, compared with the separate ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch

from mooncake_hal.backend import Backend, ScaledKVOps
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.rope_writes import ComposedRopeWrites, KVRows, QKNorms, RopeWriteOps
from mooncake_hal.testing.backends_data import Case
from mooncake_hal.testing.backends_ops import (
    ALL_DTYPES,
    DECODES,
    DTYPES,
    HEAD_DIMS,
    RATIOS,
    MakeCase,
    assert_identical,
    assert_same,
    case_maker,
    oracle,
    shape_for,
)

LENGTHS = ((1, 1), (1, 17), (1, 300), (5, 5), (33, 130))
SCALES = (0.5, 1.75)


class RopeWritesSuite:
    """Cases for ``RopeWriteOps``, or for the separate ops of backends that do not fuse them; the
    ``backend`` fixture comes from the concrete class."""

    @pytest.fixture
    def rope_case(self, backend: Backend) -> Iterator[MakeCase]:
        """Creates cases and frees their memory afterwards."""
        with case_maker(backend) as make:
            yield make

    @pytest.mark.parametrize("has_norms", [False, True])
    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_rope_and_write_kv(
        self, backend: Backend, rope_case: MakeCase, dtype: str, layout: str, has_norms: bool
    ) -> None:
        """Queries and keys are normalised and rotated, keys and values are written; no other slots
        change."""
        shape = shape_for(backend, dtype, layout)
        made, wanted = (rope_case(shape, LENGTHS) for _ in range(2))
        check_rope_writes(rope_write_ops(backend), oracle, made, wanted, has_norms=has_norms)

    @pytest.mark.parametrize("heads", RATIOS, ids=lambda pair: f"{pair[0]}to{pair[1]}")
    def test_rope_and_write_kv_of_every_ratio(
        self, backend: Backend, rope_case: MakeCase, heads: tuple[int, int]
    ) -> None:
        """Every grouping of query heads."""
        shape = shape_for(backend, heads=heads[0], kv_heads=heads[1])
        made, wanted = (rope_case(shape, DECODES) for _ in range(2))
        check_rope_writes(rope_write_ops(backend), oracle, made, wanted)

    @pytest.mark.parametrize("parts", [1, 2, 4])
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_rope_and_write_kv_of_every_width(
        self, backend: Backend, rope_case: MakeCase, head_dim: int, parts: int
    ) -> None:
        """Every head size, with the whole head rotated or only its first part."""
        shape = shape_for(backend, head_dim=head_dim)
        made, wanted = (rope_case(shape, DECODES) for _ in range(2))
        rotary_dim = head_dim // parts
        for has_norms in (False, True):
            check_rope_writes(
                rope_write_ops(backend), oracle, made, wanted, rotary_dim, has_norms=has_norms
            )

    def test_rope_and_write_kv_of_an_empty_batch(
        self, backend: Backend, rope_case: MakeCase
    ) -> None:
        """A batch without tokens changes nothing."""
        made, wanted = (rope_case(shape_for(backend), ()) for _ in range(2))
        check_rope_writes(rope_write_ops(backend), oracle, made, wanted)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rounding_does_not_depend_on_fusing(
        self, backend: Backend, rope_case: MakeCase, dtype: str
    ) -> None:
        """The fused op agrees with the backend's separate ops, except where the order of a norm's
        sum changes a rounded element by one step; values agree bit for bit."""
        made, other = (rope_case(shape_for(backend, dtype), LENGTHS) for _ in range(2))
        check_rope_writes(
            rope_write_ops(backend), ComposedRopeWrites(backend.ops), made, other, has_norms=False
        )
        check_rope_writes(rope_write_ops(backend), ComposedRopeWrites(backend.ops), made, other)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scaled_rope_and_write_kv(
        self, backend: Backend, rope_case: MakeCase, dtype: str
    ) -> None:
        """In caches of a narrower type, each plane is divided by its scale and saturated."""
        names = backend.capabilities.kv_dtypes
        if not names:
            pytest.skip(f"{backend.name} keeps KV in its ops' own type only")
        shape = replace(shape_for(backend, dtype), kv_dtype=names[0])
        made, wanted = (rope_case(shape, LENGTHS) for _ in range(2))
        for case in (made, wanted):
            case.value[0, 0, :2] = torch.tensor([1e4, -1e4])
        ops = cast(ScaledKVOps, backend.ops).with_kv_scales(*SCALES)
        fused = cast(RopeWriteOps, ops) if _is_fused(backend) else ComposedRopeWrites(ops)
        check_rope_writes(fused, oracle.with_kv_scales(*SCALES), made, wanted)


def rope_write_ops(backend: Backend) -> RopeWriteOps:
    """The ops that a model calls: the backend's fused op, or its separate ops composed."""
    ops = backend.ops
    return cast(RopeWriteOps, ops) if _is_fused(backend) else ComposedRopeWrites(ops)


def _is_fused(backend: Backend) -> bool:
    return backend.capabilities.fused_rope_writes


def check_rope_writes(
    ours: RopeWriteOps,
    theirs: RopeWriteOps,
    made: Case,
    wanted: Case,
    rotary_dim: int = 0,
    *,
    has_norms: bool = True,
) -> None:
    """Check that ``rope_and_write_kv`` of the same tokens to equal caches equals the reference's;
    queries, keys and values are views of one projection.

    Args:
        ours, theirs: the ops under test, and the reference.
        made, wanted: equal cases for them.
        rotary_dim: elements of a head that are rotated; 0: all.
        has_norms: whether queries and keys are normalised.
    """
    shape, slots = made.shape, made.batch.slot_mapping
    found, expected = (
        ops.rope_and_write_kv(
            *_projected(case, rotary_dim or shape.head_dim, has_norms=has_norms),
            case.kv.key,
            case.kv.value,
            slots,
        )
        for ops, case in ((ours, made), (theirs, wanted))
    )
    assert_same(found, expected, shape.dtype)
    written = torch.zeros(made.kv.key.shape[:2], dtype=torch.bool).flatten()
    written[slots.cpu()] = True
    new, reference = (case.kv.key.cpu().flatten(0, 1) for case in (made, wanted))
    assert_identical(new[~written], reference[~written])
    if shape.kv_dtype:  # values rounded twice may differ by one step, near zero by a few
        torch.testing.assert_close(
            new[written].float(), reference[written].float(), rtol=0.13, atol=0.02
        )
    else:
        assert_same(new[written], reference[written], shape.dtype)
    assert_identical(made.kv.value.cpu(), wanted.kv.value.cpu())


def _projected(case: Case, rotary_dim: int, *, has_norms: bool) -> tuple[torch.Tensor, KVRows]:
    """Queries and KV rows of a case's new tokens.

    Normalised values are small, so that a different rounding stays within the tolerance even if the
    rotation subtracts two elements from each other.
    """
    generator, shape = torch.Generator().manual_seed(8), case.shape
    device = case.query.device
    together = torch.cat((case.query, case.key * 3, case.value), dim=1)
    query, key, value = torch.split(together, [shape.heads, *[shape.kv_heads] * 2], dim=1)
    weights = torch.rand(2, shape.head_dim, generator=generator) / 4 + 0.1
    of_query, of_key = weights.to(shape.torch_dtype).to(device)
    angles = torch.rand(200, rotary_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    positions = (torch.arange(len(query)) * 37 % 200).to(device)
    norms = QKNorms(of_query, of_key, 1e-6) if has_norms else None
    return query, KVRows(key, value, positions, cos_sin, norms)
