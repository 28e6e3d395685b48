"""The suite's tests of a backend's kernels, compared with ``mooncake_hal.reference``.

Unwritten slots of KV caches are NaN, so a kernel that reads beyond a sequence's context, or another
layer's memory, fails immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.errors import OutOfMemory
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.reference import ReferenceOps
from mooncake_hal.testing.backends_data import LAYERS, Case, Shape, dtype_named, make_case

DTYPES = ("float32", "bfloat16")
ALL_DTYPES = (*DTYPES, "float16")
RATIOS = ((1, 1), (4, 4), (8, 4), (8, 2), (8, 1), (6, 2), (14, 2), (32, 4))
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (1.6e-2, 1e-2), "float16": (4e-3, 2e-3)}
"""(relative, absolute) tolerance; allows for one rounding more than the reference makes."""

MakeCase = Callable[..., Case]
DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 300))
PREFILLS = ((5, 5), (16, 16), (3, 40), (33, 130), (1, 1), (64, 64), (70, 300))

LONG_CONTEXT = 33_000
"""Tokens of a long context: more than a signed counter of 16 bits holds."""

_Choice = TypeVar("_Choice")

oracle = ReferenceOps()


def assert_same(found: Tensor, wanted: Tensor, dtype: str) -> None:
    """Check equality up to rounding; NaN is never equal."""
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=relative, atol=absolute)


def assert_identical(found: Tensor, wanted: Tensor) -> None:
    """Check equality bit for bit, NaN included, for ops that only move data."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def require(backend: Backend, shape: Shape) -> None:
    """Skip the test if the backend does not support the shape."""
    offered = backend.capabilities
    if shape.dtype not in offered.dtypes:
        pytest.skip(f"{backend.name} takes {offered.dtypes}, not {shape.dtype}")
    if shape.layout not in offered.kv_layouts:
        pytest.skip(f"{backend.name} takes layouts {offered.kv_layouts}, not {shape.layout}")
    if shape.block_size not in offered.block_sizes:
        pytest.skip(f"{backend.name} takes blocks of {offered.block_sizes}, not {shape.block_size}")
    if not shape.rope_dim and offered.head_dims and shape.head_dim not in offered.head_dims:
        pytest.skip(f"{backend.name} takes heads of {offered.head_dims}, not {shape.head_dim}")
    if shape.rope_dim and offered.latent_dims and shape.plane_dims not in offered.latent_dims:
        pytest.skip(
            f"{backend.name} takes latents of {offered.latent_dims}, not {shape.plane_dims}"
        )


def shape_for(
    backend: Backend, dtype: str = "", layout: str = "", block_size: int = 0, **others: int
) -> Shape:
    """Create a shape. A parameter that is not given is the suite's default if the backend supports
    that, otherwise the backend's best.

    Args:
        backend: the backend under test.
        dtype, layout, block_size, others: see ``Shape``.
    """
    capabilities, usual = backend.capabilities, Shape()
    head_dim = preferred(usual.head_dim, capabilities.head_dims or (usual.head_dim,))
    return Shape(
        offered(backend, dtype) or preferred(usual.dtype, capabilities.dtypes),
        layout or preferred(usual.layout, capabilities.kv_layouts),
        block_size=block_size or preferred(usual.block_size, capabilities.block_sizes),
        kv_dtype="",
        **{"head_dim": head_dim, **others},
    )


def offered(backend: Backend, dtype: str) -> str:
    """The dtype, or float16 in place of bfloat16 on a chip whose only 16-bit type it is: cases that
    vary something else are not skipped there."""
    dtypes = backend.capabilities.dtypes
    lacks_bfloat16 = "bfloat16" not in dtypes and "float16" in dtypes
    return "float16" if dtype == "bfloat16" and lacks_bfloat16 else dtype


def preferred(usual: _Choice, possible: Sequence[_Choice]) -> _Choice:
    """``usual`` if it is possible, otherwise the first possible choice."""
    return usual if usual in possible else possible[0]


def as_view(x: Tensor) -> Tensor:
    """The same values, [rows, heads, dim], as a view of a fused projection with NaN beside them."""
    view = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, : x.shape[1]]
    assert not view.is_contiguous()
    return view


@contextmanager
def case_maker(backend: Backend) -> Iterator[MakeCase]:
    """Yields a function that creates cases, skipping unsupported ones; frees their memory at the
    end."""
    made: list[Case] = []

    def make(shape: Shape, lengths: Sequence[tuple[int, int]], pool: int = 0) -> Case:
        require(backend, shape)
        made.append(make_case(backend, shape, lengths, pool=pool))
        return made[-1]

    yield make
    for each in made:
        each.kv.free()


class OpsSuite:
    """Cases for ``Backend.ops``; the ``backend`` fixture comes from the concrete class. An
    interpreter of kernels may set a shorter ``long_context``."""

    long_context: ClassVar[int] = LONG_CONTEXT

    @pytest.fixture
    def case(self, backend: Backend) -> Iterator[MakeCase]:
        """Creates cases and frees their memory afterwards."""
        with case_maker(backend) as make:
            yield make

    def check_decode(self, backend: Backend, case: Case) -> None:
        """Decode attention of a case equals the reference's."""
        arguments = (case.kv.key, case.kv.value, case.batch, case.shape.head_dim**-0.5)
        query = case.query[: case.batch.num_decodes]
        found = backend.ops.decode_attention(query, *arguments)
        assert_same(found, oracle.decode_attention(query, *arguments), case.shape.dtype)

    def check_prefill(self, backend: Backend, case: Case) -> None:
        """Prefill attention of a case equals the reference's."""
        arguments = (case.kv.key, case.kv.value, case.batch, case.shape.head_dim**-0.5)
        query = case.query[case.batch.num_decodes :]
        found = backend.ops.prefill_attention(query, *arguments)
        assert_same(found, oracle.prefill_attention(query, *arguments), case.shape.dtype)

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_decode_attention_layouts(
        self, backend: Backend, case: MakeCase, dtype: str, layout: str
    ) -> None:
        """Every layout and dtype."""
        self.check_decode(backend, case(shape_for(backend, dtype, layout), DECODES))

    @pytest.mark.parametrize("heads", RATIOS, ids=lambda pair: f"{pair[0]}to{pair[1]}")
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_decode_attention_head_ratios(
        self, backend: Backend, case: MakeCase, dtype: str, heads: tuple[int, int]
    ) -> None:
        """Every grouping of query heads."""
        shape = shape_for(backend, dtype, heads=heads[0], kv_heads=heads[1])
        self.check_decode(backend, case(shape, DECODES))

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_decode_attention_head_dims(
        self, backend: Backend, case: MakeCase, dtype: str, head_dim: int
    ) -> None:
        """Every head size."""
        self.check_decode(backend, case(shape_for(backend, dtype, head_dim=head_dim), DECODES))

    @pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128, 256])
    def test_decode_attention_block_sizes(
        self, backend: Backend, case: MakeCase, block_size: int
    ) -> None:
        """Block sizes, and contexts of several thousand tokens."""
        shape = shape_for(backend, block_size=block_size)
        self.check_decode(backend, case(shape, (*DECODES, (1, 2500))))

    def test_attention_takes_strided_queries(self, backend: Backend, case: MakeCase) -> None:
        """Queries as a view of a fused projection."""
        made = case(shape_for(backend), ((1, 17), (1, 30), (3, 40), (5, 5)))
        made.query = as_view(made.query)
        self.check_decode(backend, made)
        self.check_prefill(backend, made)

    def test_attention_over_long_contexts(self, backend: Backend, case: MakeCase) -> None:
        """Contexts of more than 32768 tokens, of which the last ones count as much as the first."""
        shape = shape_for(backend, heads=2, kv_heads=1)
        made = case(shape, ((1, self.long_context), (2, self.long_context)))
        made.query *= 4  # a few tokens anywhere dominate: all are needed
        self.check_decode(backend, made)
        self.check_prefill(backend, made)

    def test_slots_and_elements_beyond_31_bits(self, backend: Backend, case: MakeCase) -> None:
        """Blocks more than 2^31 elements from the cache's first one are written, attended to and
        copied. Only these blocks of the pool are used."""
        narrow = min(backend.capabilities.dtypes, key=lambda name: dtype_named(name).itemsize)
        shape = shape_for(backend, narrow, "BHLPT")
        require(backend, shape)
        block = LAYERS * 2 * shape.kv_heads * shape.block_size * shape.head_dim
        pool = (1 << 31) // block + 16
        free = backend.runtime.memory_info(0).free_bytes
        if free < pool * block * shape.torch_dtype.itemsize + (1 << 30):
            pytest.skip(f"{backend.name} has {free} bytes of memory, too few for 2^31 elements")
        try:
            made = case(shape, ((1, 2 * shape.block_size), (3, 40)), pool)
        except OutOfMemory as exc:  # an emulated device may have less than its runtime says
            pytest.skip(str(exc))
        key, value, slots = made.kv.key, made.kv.value, made.batch.slot_mapping
        backend.ops.write_kv(made.key, made.value, key, value, slots)
        blocks, offsets = slots // shape.block_size, slots % shape.block_size
        assert int(blocks.min()) * block >= 1 << 31
        for cache, new in ((key, made.key), (value, made.value)):
            assert_identical(cache[blocks, offsets], new)
        self.check_decode(backend, made)
        self.check_prefill(backend, made)
        source, target = blocks[:1], self._ids(backend, (pool - 1,))  # which no sequence has
        backend.ops.copy_blocks(key, source, target)
        staging = torch.zeros_like(key[:1])
        backend.ops.gather_blocks(key, target, staging)
        assert_identical(staging, key[source])
        backend.ops.scatter_blocks(staging + 1, key, target)
        assert_identical(key[target], staging + 1)

    def test_decode_attention_survives_large_scores(self, backend: Backend, case: MakeCase) -> None:
        """Scores of a few thousand neither overflow nor lose the maximum."""
        made = case(shape_for(backend), DECODES)
        made.query *= 1000
        self.check_decode(backend, made)

    def test_decode_attention_of_an_empty_batch(self, backend: Backend, case: MakeCase) -> None:
        """An empty batch gives an empty result."""
        made = case(shape_for(backend), ())
        found = backend.ops.decode_attention(
            made.query, made.kv.key, made.kv.value, made.batch, 1.0
        )
        assert found.shape == made.query[:0].shape

    def test_captured_decodes_follow_their_batch(self, backend: Backend, case: MakeCase) -> None:
        """A replay uses the queries, contexts and new tokens that are in its tensors then."""
        if not backend.capabilities.graphs:
            pytest.skip(f"{backend.name} has no graphs")
        made = case(shape_for(backend), DECODES)
        kv, batch, out = made.kv, made.batch, torch.empty_like(made.query)

        def step() -> None:
            backend.ops.write_kv(made.key, made.value, kv.key, kv.value, batch.slot_mapping)
            out.copy_(backend.ops.decode_attention(made.query, kv.key, kv.value, batch, 0.1))

        graph = backend.runtime.capture(step)
        for lengths in ([1] * len(DECODES), [min(context, 14) for _, context in DECODES]):
            made.query.mul_(-1)
            batch.context_lens.copy_(torch.tensor(lengths))
            graph.replay(lengths)
            now = replace(batch, host_context_lens=tuple(lengths))
            wanted = oracle.decode_attention(made.query, kv.key, kv.value, now, 0.1)
            assert_same(out, wanted, made.shape.dtype)

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_prefill_attention_layouts(
        self, backend: Backend, case: MakeCase, dtype: str, layout: str
    ) -> None:
        """Every layout and dtype, with and without a cached prefix, decodes before them."""
        lengths = ((1, 20), (1, 33), *PREFILLS)
        self.check_prefill(backend, case(shape_for(backend, dtype, layout), lengths))

    @pytest.mark.parametrize("heads", RATIOS, ids=lambda pair: f"{pair[0]}to{pair[1]}")
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_prefill_attention_head_ratios(
        self, backend: Backend, case: MakeCase, dtype: str, heads: tuple[int, int]
    ) -> None:
        """Every grouping of query heads."""
        shape = shape_for(backend, dtype, heads=heads[0], kv_heads=heads[1])
        self.check_prefill(backend, case(shape, PREFILLS))

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_prefill_attention_head_dims(
        self, backend: Backend, case: MakeCase, dtype: str, head_dim: int
    ) -> None:
        """Every head size."""
        self.check_prefill(backend, case(shape_for(backend, dtype, head_dim=head_dim), PREFILLS))

    def test_prefill_attention_of_an_empty_batch(self, backend: Backend, case: MakeCase) -> None:
        """A batch of decodes alone has no prefill rows."""
        made = case(shape_for(backend), DECODES)
        found = backend.ops.prefill_attention(
            made.query[len(DECODES) :], made.kv.key, made.kv.value, made.batch, 1.0
        )
        assert found.shape == made.query[:0].shape

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_write_kv(self, backend: Backend, case: MakeCase, dtype: str, layout: str) -> None:
        """New tokens are written to their slots; no other slots change."""
        made, wanted = (
            case(shape_for(backend, dtype, layout), (*DECODES, *PREFILLS)) for _ in range(2)
        )
        new = (made.key, made.value)
        backend.ops.write_kv(*new, made.kv.key, made.kv.value, made.batch.slot_mapping)
        oracle.write_kv(*new, wanted.kv.key, wanted.kv.value, wanted.batch.slot_mapping)
        assert_identical(made.kv.allocation.tensor, wanted.kv.allocation.tensor)

    def test_write_kv_takes_strided_inputs(self, backend: Backend, case: MakeCase) -> None:
        """Keys and values as views of a fused projection."""
        made, wanted = (case(shape_for(backend), PREFILLS) for _ in range(2))
        fused = torch.cat((made.key, made.value), dim=1)
        new = (fused[:, :2], fused[:, 2:])
        backend.ops.write_kv(*new, made.kv.key, made.kv.value, made.batch.slot_mapping)
        oracle.write_kv(*new, wanted.kv.key, wanted.kv.value, wanted.batch.slot_mapping)
        assert_identical(made.kv.allocation.tensor, wanted.kv.allocation.tensor)

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    def test_blocks_are_copied(self, backend: Backend, case: MakeCase, layout: str) -> None:
        """copy_blocks copies whole blocks and changes no others."""
        shape = shape_for(backend, layout=layout)
        lengths = ((1, 7 * shape.block_size), (1, 4 * shape.block_size))
        made, wanted = (case(shape, lengths) for _ in range(2))
        source, target = self._ids(backend, (0, 3, 3)), self._ids(backend, (5, 1, 7))
        for cache, expected in zip(self._caches(made), self._caches(wanted), strict=True):
            backend.ops.copy_blocks(cache, source, target)
            oracle.copy_blocks(expected, source, target)
        assert_identical(made.kv.allocation.tensor, wanted.kv.allocation.tensor)

    @pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
    def test_blocks_are_packed_and_unpacked(
        self, backend: Backend, case: MakeCase, layout: str
    ) -> None:
        """gather_blocks packs, and scatter_blocks unpacks elsewhere."""
        shape = shape_for(backend, layout=layout)
        lengths = ((1, 7 * shape.block_size), (1, 4 * shape.block_size))
        made, wanted = (case(shape, lengths) for _ in range(2))
        source, target = self._ids(backend, (6, 0, 2)), self._ids(backend, (1, 7, 4))
        for cache, expected in zip(self._caches(made), self._caches(wanted), strict=True):
            staging = torch.zeros((3, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
            backend.ops.gather_blocks(cache, source, staging)
            assert_identical(staging, expected[source])
            backend.ops.scatter_blocks(staging, cache, target)
            oracle.scatter_blocks(staging, expected, target)
        assert_identical(made.kv.allocation.tensor, wanted.kv.allocation.tensor)

    def _caches(self, case: Case) -> tuple[Tensor, Tensor]:
        return case.kv.key, case.kv.value

    def _ids(self, backend: Backend, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(backend.runtime.device(0))
