"""The suite's tests of latent attention: the MLA kernels, compared with
``mooncake_hal.reference``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from mooncake_hal.backend import Backend
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.latents import LatentOps, LatentRows
from mooncake_hal.testing.backends_data import Case, Shape
from mooncake_hal.testing.backends_ops import (
    ALL_DTYPES,
    DECODES,
    DTYPES,
    LONG_CONTEXT,
    PREFILLS,
    MakeCase,
    as_view,
    assert_identical,
    assert_same,
    case_maker,
    oracle,
    preferred,
    shape_for,
)

WIDTHS = ((512, 64), (64, 16), (48, 16), (36, 12))
"""(latent, rope) widths: DeepSeek's, and small ones that do not fill a vector register."""
USUAL = (64, 16)
"""Widths of the cases that test something else."""


def latent_shape(
    backend: Backend,
    dtype: str = "",
    layout: str = "",
    dims: tuple[int, int] | None = None,
    **others: int,
) -> Shape:
    """A shape for latent attention; see ``shape_for`` for the defaults."""
    possible = backend.capabilities.latent_dims or (USUAL,)
    latent, rope = dims or preferred(USUAL, possible)
    sizes = {"heads": 8, "kv_heads": 1, "head_dim": latent, "rope_dim": rope, **others}
    return shape_for(backend, dtype, layout, **sizes)


class LatentSuite:
    """Cases for the MLA kernels; the ``backend`` fixture comes from the concrete class."""

    long_context: ClassVar[int] = LONG_CONTEXT

    @pytest.fixture
    def latent_case(self, backend: Backend) -> Iterator[MakeCase]:
        """Creates cases and frees their memory afterwards."""
        with case_maker(backend) as make:
            yield make

    def check_latent(self, backend: Backend, case: Case) -> None:
        """Both kernels of a case equal the reference's."""
        scale, decodes = case.shape.query_dim**-0.5, case.batch.num_decodes
        arguments = (case.kv.key, case.kv.value, case.batch, scale)
        query, dtype = case.query, case.shape.dtype
        found = backend.ops.mla_decode_attention(query[:decodes], *arguments)
        assert_same(found, oracle.mla_decode_attention(query[:decodes], *arguments), dtype)
        found = backend.ops.mla_prefill_attention(query[decodes:], *arguments)
        assert_same(found, oracle.mla_prefill_attention(query[decodes:], *arguments), dtype)

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_mla_layouts(
        self, backend: Backend, latent_case: MakeCase, dtype: str, layout: str
    ) -> None:
        """Every layout and dtype, decodes and prompts in one batch."""
        made = latent_case(latent_shape(backend, dtype, layout), (*DECODES, *PREFILLS))
        self.check_latent(backend, made)

    @pytest.mark.parametrize("heads", [1, 2, 5, 16, 128])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_mla_heads(
        self, backend: Backend, latent_case: MakeCase, dtype: str, heads: int
    ) -> None:
        """Every number of heads that a rank may have."""
        lengths = ((1, 17), (1, 300), (3, 40))
        self.check_latent(backend, latent_case(latent_shape(backend, dtype, heads=heads), lengths))

    @pytest.mark.parametrize("dims", WIDTHS, ids=lambda dims: f"{dims[0]}and{dims[1]}")
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_mla_widths(
        self, backend: Backend, latent_case: MakeCase, dtype: str, dims: tuple[int, int]
    ) -> None:
        """Every width of the two planes."""
        lengths = ((1, 1), (1, 33), (5, 70))
        self.check_latent(backend, latent_case(latent_shape(backend, dtype, dims=dims), lengths))

    @pytest.mark.parametrize("block_size", [4, 16, 64, 128, 256])
    def test_mla_block_sizes(
        self, backend: Backend, latent_case: MakeCase, block_size: int
    ) -> None:
        """Block sizes, long contexts, and prompts longer than a kernel's tile."""
        lengths = (*DECODES, (1, 2500), (200, 900))
        self.check_latent(
            backend, latent_case(latent_shape(backend, block_size=block_size), lengths)
        )

    def test_mla_takes_strided_queries(self, backend: Backend, latent_case: MakeCase) -> None:
        """Queries as a view of a wider tensor."""
        made = latent_case(latent_shape(backend), ((1, 17), (1, 30), (3, 40), (5, 5)))
        made.query = as_view(made.query)
        self.check_latent(backend, made)

    def test_mla_over_long_contexts(self, backend: Backend, latent_case: MakeCase) -> None:
        """Contexts of more than 32768 tokens, of which the last ones count as much as the first."""
        lengths = ((1, self.long_context), (2, self.long_context))
        made = latent_case(latent_shape(backend, heads=2), lengths)
        made.query *= 4  # a few tokens anywhere dominate: all are needed
        self.check_latent(backend, made)

    def test_mla_of_an_empty_batch(self, backend: Backend, latent_case: MakeCase) -> None:
        """An empty batch gives an empty result."""
        made = latent_case(latent_shape(backend), ())
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 1.0)
        assert backend.ops.mla_decode_attention(*arguments).shape == (0, 8, made.shape.head_dim)
        assert backend.ops.mla_prefill_attention(*arguments).shape == (0, 8, made.shape.head_dim)

    def test_mla_of_a_sequence_does_not_depend_on_others(
        self, backend: Backend, latent_case: MakeCase
    ) -> None:
        """A sequence's result is the same, bit for bit, whatever else is in its batch."""
        made = latent_case(latent_shape(backend), ((1, 40), (1, 300), (9, 80), (70, 90)))
        alone = latent_case(latent_shape(backend), ((1, 300),))
        batch, kv = made.batch, made.kv
        together = backend.ops.mla_decode_attention(made.query[:2], kv.key, kv.value, batch, 0.1)
        alone.batch.block_tables.copy_(batch.block_tables[1:2, : alone.batch.block_tables.shape[1]])
        arguments = (made.query[1:2], kv.key, kv.value, alone.batch, 0.1)
        assert torch.equal(backend.ops.mla_decode_attention(*arguments), together[1:])

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_write_latents(
        self, backend: Backend, latent_case: MakeCase, dtype: str, layout: str
    ) -> None:
        """Norm, rotation of rows and queries, and writes; no other slots change."""
        shape = latent_shape(backend, dtype, layout)
        made, wanted = (latent_case(shape, (*DECODES, *PREFILLS)) for _ in range(2))
        check_writes(backend.ops, oracle, made, wanted)

    @pytest.mark.parametrize("dims", WIDTHS, ids=lambda dims: f"{dims[0]}and{dims[1]}")
    def test_write_latents_of_every_width(
        self, backend: Backend, latent_case: MakeCase, dims: tuple[int, int]
    ) -> None:
        """Every width of the two planes."""
        made, wanted = (latent_case(latent_shape(backend, dims=dims), DECODES) for _ in range(2))
        check_writes(backend.ops, oracle, made, wanted)

    def test_write_latents_of_an_empty_batch(self, backend: Backend, latent_case: MakeCase) -> None:
        """A batch without tokens changes nothing."""
        made, wanted = (latent_case(latent_shape(backend), ()) for _ in range(2))
        check_writes(backend.ops, oracle, made, wanted)


def check_writes(ours: LatentOps, theirs: LatentOps, made: Case, wanted: Case) -> None:
    """Check that ``write_latents`` of the same tokens to equal caches equals the reference's.

    Args:
        ours, theirs: the ops under test, and the reference.
        made, wanted: equal cases for them.
    """
    rows, shape, batch = latent_rows(made), made.shape, made.batch
    query = made.query[..., shape.head_dim :]
    expected = theirs.write_latents(
        query.clone(), rows, wanted.kv.key, wanted.kv.value, batch.slot_mapping
    )
    plain, rotated = torch.split(rows.compressed, list(shape.plane_dims), dim=-1)
    packed = rows._replace(compressed=torch.cat((plain, ours.pack_rope(rotated.T).T), dim=-1))
    found = ours.write_latents(query, packed, made.kv.key, made.kv.value, batch.slot_mapping)
    assert_same(found, expected, shape.dtype)
    written = torch.zeros(made.kv.key.shape[:2], dtype=torch.bool).flatten()
    written[batch.slot_mapping.cpu()] = True
    for caches in ((made.kv.key, wanted.kv.key), (made.kv.value, wanted.kv.value)):
        new, reference = (each.cpu().flatten(0, 1) for each in caches)
        assert_identical(new[~written], reference[~written])
        if shape.kv_dtype:  # values that are rounded twice may differ by one step
            found, expected = new[written].float(), reference[written].float()
            torch.testing.assert_close(found, expected, rtol=0.13, atol=0.002)
        else:
            assert_same(new[written], reference[written], shape.dtype)


def latent_rows(case: Case, seed: int = 7) -> LatentRows:
    """Possible outputs of a layer's projection for the case's new tokens, with the rope elements in
    the order of halves.

    The rope elements are small, since a kernel may round the table to the rows' dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    latent_dim, rope_dim = case.shape.plane_dims
    device, dtype = case.query.device, case.shape.torch_dtype
    compressed = torch.cat((case.key * 3, case.value / 2), dim=-1)[:, 0]
    weight = torch.rand(latent_dim, generator=generator).to(dtype).to(device) + 0.5
    angles = torch.rand(200, rope_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    positions = (torch.arange(len(compressed)) * 37 % 200).to(device)
    return LatentRows(compressed, weight, 1e-6, positions, cos_sin)
