"""Latents in a backend's native form, of the suite: turned from rows, written, attended to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.latents import LatentOps, NativeLatentOps
from mooncake_hal.testing.backends_data import Case, make_case
from mooncake_hal.testing.backends_latent import latent_rows, latent_shape
from mooncake_hal.testing.backends_ops import (
    ALL_DTYPES,
    DECODES,
    PREFILLS,
    MakeCase,
    assert_identical,
    assert_same,
    oracle,
    require,
)

LENGTHS = (*DECODES, *PREFILLS)


class NativeLatentsSuite:
    """Cases for ``NativeLatentOps``; the ``backend`` fixture comes from the concrete class."""

    @pytest.fixture
    def resident_case(self, backend: Backend) -> Iterator[MakeCase]:
        """Makes cases of latents as rows, and frees their memory afterwards."""
        if not backend.capabilities.native_latents:
            pytest.skip(f"{backend.name} keeps latents as rows only")
        made: list[Case] = []

        def make(dtype: str = "", heads: int = 8, seed: int = 0) -> Case:
            shape = latent_shape(backend, dtype, heads=heads)
            require(backend, shape)
            made.append(make_case(backend, shape, LENGTHS, seed))
            return made[-1]

        yield make
        for each in made:
            each.kv.free()

    @pytest.mark.parametrize("heads", [1, 5, 16])
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_turned_blocks_are_attended_to(
        self, backend: Backend, resident_case: MakeCase, dtype: str, heads: int
    ) -> None:
        """Decodes and prompts, as over rows; the last blocks are filled in part."""
        made = resident_case(dtype, heads)
        wanted = attended(oracle, made)
        make_all_resident(backend, made)
        found = attended(native_form(backend), made)
        assert_same(found, wanted, made.shape.dtype)

    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_what_is_written_is_what_is_turned(
        self, backend: Backend, resident_case: MakeCase, dtype: str
    ) -> None:
        """To the bit: tokens written into turned blocks, and rows written and turned then."""
        before, after = (resident_case(dtype) for _ in range(2))
        make_all_resident(backend, before)
        queries = [write(native_form(backend), before), write(backend.ops, after)]
        make_all_resident(backend, after)
        assert_identical(*queries)
        assert_identical(before.kv.allocation.tensor, after.kv.allocation.tensor)

    def test_no_other_block_is_turned(self, backend: Backend, resident_case: MakeCase) -> None:
        """In any order, one by one or together; none at all is fine."""
        together, one_by_one = (resident_case() for _ in range(2))
        some = torch.tensor([3, 0, 5], device=together.query.device)
        native_ops(backend).convert_latents(together.kv.key, some)
        for block_id in (0, 5, 3):
            one = torch.tensor([block_id], device=some.device)
            native_ops(backend).convert_latents(one_by_one.kv.key, one)
        native_ops(backend).convert_latents(together.kv.key, some[:0])
        assert_identical(together.kv.allocation.tensor, one_by_one.kv.allocation.tensor)
        untouched = resident_case()
        others = [i for i in range(len(untouched.kv.key)) if i not in some.tolist()]
        assert_identical(together.kv.key[others], untouched.kv.key[others])
        assert (together.kv.key[some] != untouched.kv.key[some]).flatten(1).any(1).all()

    def test_turned_blocks_are_moved(self, backend: Backend, resident_case: MakeCase) -> None:
        """Copied within the cache, or packed, and unpacked elsewhere: the same answers."""
        made = resident_case()
        wanted = attended(oracle, made)
        make_all_resident(backend, made)
        count = len(made.kv.key)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        target = order.to(made.query.device)
        source = torch.arange(count, device=target.device)
        for cache in (made.kv.key, made.kv.value):
            staging = torch.empty_like(cache)
            backend.ops.gather_blocks(cache, source, staging)
            backend.ops.scatter_blocks(staging, cache, target)
        tables = order[made.batch.block_tables.cpu().long()].int().to(target.device)
        moved = replace(made, batch=replace(made.batch, block_tables=tables))
        assert_same(attended(native_form(backend), moved), wanted, made.shape.dtype)


def native_ops(backend: Backend) -> NativeLatentOps:
    """The backend's ops, as what its capabilities say that they are."""
    return cast(NativeLatentOps, backend.ops)


def native_form(backend: Backend) -> LatentOps:
    """The ops over the native form."""
    return native_ops(backend).with_native_latents()


def make_all_resident(backend: Backend, case: Case) -> None:
    """Turn every block of a case's cache."""
    everything = torch.arange(len(case.kv.key), device=case.query.device)
    for cache in (case.kv.key, case.kv.value):
        native_ops(backend).convert_latents(cache, everything)


def attended(ops: LatentOps, case: Case) -> Tensor:
    """Decodes, then prompts: [tokens, heads, latent]."""
    decodes, query = case.batch.num_decodes, case.query
    arguments = (case.kv.key, case.kv.value, case.batch, case.shape.query_dim**-0.5)
    found = ops.mla_decode_attention(query[:decodes], *arguments)
    return torch.cat((found, ops.mla_prefill_attention(query[decodes:], *arguments)))


def write(ops: LatentOps, case: Case) -> Tensor:
    """Write the case's new tokens; returns the rotated queries."""
    query = case.query[..., case.shape.head_dim :].clone()
    return ops.write_latents(
        query, latent_rows(case), case.kv.key, case.kv.value, case.batch.slot_mapping
    )
