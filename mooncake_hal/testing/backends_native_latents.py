"""The suite's tests of latents in a backend's native layout: conversion from rows, writes and
attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.latents import LatentOps, NativeLatentOps
from mooncake_hal.testing.backends_data import Case
from mooncake_hal.testing.backends_latent import latent_rows, latent_shape
from mooncake_hal.testing.backends_ops import (
    ALL_DTYPES,
    DECODES,
    PREFILLS,
    MakeCase,
    assert_identical,
    assert_same,
    case_maker,
    oracle,
)

LENGTHS = (*DECODES, *PREFILLS)


class NativeLatentsSuite:
    """Cases for ``NativeLatentOps``; the ``backend`` fixture comes from the concrete class."""

    @pytest.fixture
    def native_case(self, backend: Backend) -> Iterator[MakeCase]:
        """Creates cases with latents as rows, and frees their memory afterwards."""
        if not backend.capabilities.native_latents:
            pytest.skip(f"{backend.name} keeps latents as rows only")
        with case_maker(backend) as make:
            yield lambda dtype="", heads=8: make(latent_shape(backend, dtype, heads=heads), LENGTHS)

    @pytest.mark.parametrize("heads", [1, 5, 16])
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_attention_over_native_blocks(
        self, backend: Backend, native_case: MakeCase, dtype: str, heads: int
    ) -> None:
        """Decodes and prompts equal those over rows; the last blocks are partly filled."""
        made = native_case(dtype, heads)
        wanted = attended(oracle, made)
        make_all_native(backend, made)
        found = attended(native_latents_ops(backend), made)
        assert_same(found, wanted, made.shape.dtype)

    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_native_writes_equal_converted_rows(
        self, backend: Backend, native_case: MakeCase, dtype: str
    ) -> None:
        """Writing tokens to native blocks equals, bit for bit, writing rows and converting them."""
        before, after = (native_case(dtype) for _ in range(2))
        make_all_native(backend, before)
        queries = [write(native_latents_ops(backend), before), write(backend.ops, after)]
        make_all_native(backend, after)
        assert_identical(*queries)
        assert_identical(before.kv.allocation.tensor, after.kv.allocation.tensor)

    def test_only_named_blocks_are_converted(self, backend: Backend, native_case: MakeCase) -> None:
        """Blocks can be converted one by one or together, in any order; an empty list is valid."""
        together, one_by_one = (native_case() for _ in range(2))
        some = torch.tensor([3, 0, 5], device=together.query.device)
        native_ops(backend).convert_latents(together.kv.key, some)
        for block_id in (0, 5, 3):
            one = torch.tensor([block_id], device=some.device)
            native_ops(backend).convert_latents(one_by_one.kv.key, one)
        native_ops(backend).convert_latents(together.kv.key, some[:0])
        assert_identical(together.kv.allocation.tensor, one_by_one.kv.allocation.tensor)
        untouched = native_case()
        others = [i for i in range(len(untouched.kv.key)) if i not in some.tolist()]
        assert_identical(together.kv.key[others], untouched.kv.key[others])
        assert (together.kv.key[some] != untouched.kv.key[some]).flatten(1).any(1).all()

    def test_native_blocks_can_be_moved(self, backend: Backend, native_case: MakeCase) -> None:
        """Native blocks that are gathered and scattered elsewhere give the same results."""
        made = native_case()
        wanted = attended(oracle, made)
        make_all_native(backend, made)
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
        assert_same(attended(native_latents_ops(backend), moved), wanted, made.shape.dtype)


def native_ops(backend: Backend) -> NativeLatentOps:
    """The backend's ops as ``NativeLatentOps``."""
    return cast(NativeLatentOps, backend.ops)


def native_latents_ops(backend: Backend) -> LatentOps:
    """The backend's ops for caches in the native layout."""
    return native_ops(backend).with_native_latents()


def make_all_native(backend: Backend, case: Case) -> None:
    """Convert every block of a case's cache."""
    everything = torch.arange(len(case.kv.key), device=case.query.device)
    for cache in (case.kv.key, case.kv.value):
        native_ops(backend).convert_latents(cache, everything)


def attended(ops: LatentOps, case: Case) -> Tensor:
    """Attention of the case's decodes, then of its prompts: [tokens, heads, latent]."""
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
