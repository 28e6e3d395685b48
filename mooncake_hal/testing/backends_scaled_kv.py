"""The suite's tests of KV in narrower types: writes, attention and copies of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch

from mooncake_hal.backend import Backend, Ops, ScaledKVOps
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.testing.backends_latent import check_writes, latent_shape
from mooncake_hal.testing.backends_ops import (
    DTYPES,
    MakeCase,
    assert_identical,
    assert_same,
    case_maker,
    oracle,
    shape_for,
)

SCALES = (0.5, 1.75)
LENGTHS = ((1, 1), (1, 17), (1, 300), (5, 5), (33, 130))


class ScaledKVSuite:
    """Cases for ``ScaledKVOps``; the ``backend`` fixture comes from the concrete class."""

    @pytest.fixture
    def scaled_case(self, backend: Backend) -> Iterator[MakeCase]:
        """Creates cases in the backend's narrower type, and frees their memory afterwards."""
        names = backend.capabilities.kv_dtypes
        if not names:
            pytest.skip(f"{backend.name} keeps KV in its ops' own type only")

        with case_maker(backend) as make:
            yield lambda shape, lengths: make(replace(shape, kv_dtype=names[0]), lengths)

    def ops(self, backend: Backend) -> tuple[Ops, Ops]:
        """The backend's and the reference's ops, with the same scales."""
        found = cast(ScaledKVOps, backend.ops).with_kv_scales(*SCALES)
        return found, oracle.with_kv_scales(*SCALES)

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scaled_attention(
        self, backend: Backend, scaled_case: MakeCase, dtype: str, layout: str
    ) -> None:
        """Attention of decodes and prompts."""
        made = scaled_case(shape_for(backend, dtype, layout), LENGTHS)
        decodes, arguments = made.batch.num_decodes, (made.kv.key, made.kv.value, made.batch, 0.125)
        (found, wanted), query = self.ops(backend), made.query
        assert_same(
            found.decode_attention(query[:decodes], *arguments),
            wanted.decode_attention(query[:decodes], *arguments),
            dtype,
        )
        assert_same(
            found.prefill_attention(query[decodes:], *arguments),
            wanted.prefill_attention(query[decodes:], *arguments),
            dtype,
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scaled_latents(self, backend: Backend, scaled_case: MakeCase, dtype: str) -> None:
        """Latent attention, with a scale for each plane."""
        made = scaled_case(latent_shape(backend, dtype), LENGTHS)
        decodes, arguments = made.batch.num_decodes, (made.kv.key, made.kv.value, made.batch, 0.1)
        (found, wanted), query = self.ops(backend), made.query
        assert_same(
            found.mla_decode_attention(query[:decodes], *arguments),
            wanted.mla_decode_attention(query[:decodes], *arguments),
            dtype,
        )
        assert_same(
            found.mla_prefill_attention(query[decodes:], *arguments),
            wanted.mla_prefill_attention(query[decodes:], *arguments),
            dtype,
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scaled_values_are_rounded_once(
        self, backend: Backend, scaled_case: MakeCase, dtype: str
    ) -> None:
        """Writes equal the reference's bit for bit; too large values saturate and do not become
        NaN."""
        made, wanted = (scaled_case(shape_for(backend, dtype), LENGTHS) for _ in range(2))
        made.key[0, 0, :2] = torch.tensor([1e4, -1e4])
        ours, theirs = self.ops(backend)
        new = (made.key, made.value)
        ours.write_kv(*new, made.kv.key, made.kv.value, made.batch.slot_mapping)
        theirs.write_kv(*new, wanted.kv.key, wanted.kv.value, wanted.batch.slot_mapping)
        assert_identical(made.kv.allocation.tensor, wanted.kv.allocation.tensor)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scaled_latents_are_written(
        self, backend: Backend, scaled_case: MakeCase, dtype: str
    ) -> None:
        """Both planes are divided by their scales."""
        made, wanted = (scaled_case(latent_shape(backend, dtype), LENGTHS) for _ in range(2))
        check_writes(*self.ops(backend), made, wanted)

    def test_scaled_blocks_are_moved(self, backend: Backend, scaled_case: MakeCase) -> None:
        """Copying, gathering and scattering preserve every bit."""
        made, wanted = (scaled_case(shape_for(backend), ((1, 100), (1, 50))) for _ in range(2))
        device = backend.runtime.device(0)
        source, target = (torch.tensor(ids, device=device) for ids in ((0, 3), (5, 1)))
        for cache, expected in ((made.kv.key, wanted.kv.key), (made.kv.value, wanted.kv.value)):
            backend.ops.copy_blocks(cache, source, target)
            oracle.copy_blocks(expected, source, target)
            staging = torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype, device=device)
            backend.ops.gather_blocks(cache, target, staging)
            backend.ops.scatter_blocks(staging, cache, source + 2)
            oracle.scatter_blocks(expected[target], expected, source + 2)
        assert_identical(made.kv.allocation.tensor, wanted.kv.allocation.tensor)
