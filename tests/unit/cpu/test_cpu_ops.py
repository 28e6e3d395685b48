"""A guarantee of the CPU's kernels beyond the suite: batch invariance, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch
from mooncake_hal.testing.backends_data import Case, Shape, make_case
from mooncake_hal_cpu.cpu_backend import CpuBackend
from mooncake_hal_cpu.cpu_ops import NativeOps, cpu_ops
from mooncake_hal_cpu.torch_ops import TorchOps

BACKEND = CpuBackend()
OPS = BACKEND.ops
SHAPES = [
    Shape(dtype, heads=heads, kv_heads=2, head_dim=dim)
    for dtype, heads, dim in (("float32", 6, 64), ("bfloat16", 8, 128), ("bfloat16", 2, 80))
]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    found: Shape = request.param
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(batch: AttentionBatch, first: int, stop: int, decodes: int) -> AttentionBatch:
    """Return sequences [first, stop) of a batch as a batch of their own."""
    return replace(
        batch,
        num_decodes=decodes,
        query_start=batch.query_start[first : stop + 1] - batch.query_start[first],
        context_lens=batch.context_lens[first:stop],
        block_tables=batch.block_tables[first:stop],
        host_query_lens=batch.host_query_lens[first:stop],
        host_context_lens=batch.host_context_lens[first:stop],
    )


def decode(case: Case, query: Tensor, batch: AttentionBatch) -> Tensor:
    return OPS.decode_attention(query, case.kv.key, case.kv.value, batch, 0.125)


def prefill(case: Case, query: Tensor, batch: AttentionBatch) -> Tensor:
    return OPS.prefill_attention(query, case.kv.key, case.kv.value, batch, 0.125)


def test_this_machine_compiles_the_kernels() -> None:
    assert isinstance(OPS, NativeOps)


def test_torch_is_used_with_a_warning_without_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_CPU_NATIVE", "0")
    monkeypatch.setattr("mooncake_hal.native._warned", set())
    assert type(cpu_ops()) is TorchOps
    assert "using plain torch: MOONCAKE_HAL_CPU_NATIVE=0" in caplog.text


def test_a_decode_is_the_same_alone_and_in_a_batch(shape: Shape) -> None:
    case = make_case(BACKEND, shape, [(1, length) for length in (3, 700, 64, 1025, 256)])
    together = decode(case, case.query, case.batch)
    for row in range(5):
        alone = decode(case, case.query[row : row + 1], rows_of(case.batch, row, row + 1, 1))
        assert torch.equal(alone[0], together[row])


def test_a_decode_is_the_same_on_any_number_of_threads(shape: Shape, threads: None) -> None:
    case = make_case(BACKEND, shape, [(1, 3000), (1, 17)])
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(decode(case, case.query, case.batch))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_decode_is_the_same_in_blocks_of_any_size() -> None:
    key, value = (torch.randn(384, 2, 64).bfloat16() for _ in range(2))
    query = torch.randn(1, 8, 64).bfloat16()
    results = []
    for block_size, layout in ((16, "LPBHT"), (128, "LPBTH"), (4, "BHLPT")):
        case = make_case(BACKEND, Shape("bfloat16", layout, block_size=block_size), [(1, 300)])
        blocks = case.batch.block_tables[0].long()
        tokens = len(blocks) * block_size
        for cache, new in ((case.kv.key, key), (case.kv.value, value)):
            cache[blocks] = new[:tokens].view(-1, block_size, 2, 64)
        results.append(decode(case, query, case.batch))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_prompt_is_the_same_whole_and_in_chunks(shape: Shape) -> None:
    case = make_case(BACKEND, shape, [(300, 300)])
    whole = prefill(case, case.query, case.batch)
    for first, stop in ((0, 128), (128, 131), (131, 300)):
        chunk = replace(
            case.batch,
            query_start=torch.tensor([0, stop - first], dtype=torch.int32),
            context_lens=torch.tensor([stop], dtype=torch.int32),
            host_query_lens=(stop - first,),
            host_context_lens=(stop,),
        )
        assert torch.equal(prefill(case, case.query[first:stop], chunk), whole[first:stop])


def test_a_prompt_is_the_same_alone_and_in_a_batch(shape: Shape, threads: None) -> None:
    case = make_case(BACKEND, shape, [(1, 9), (40, 40), (7, 150), (130, 130)])
    torch.set_num_threads(2)
    together = prefill(case, case.query[1:], case.batch)
    torch.set_num_threads(1)
    starts = (0, 40, 47, 177)
    for row in range(3):
        mine = slice(starts[row], starts[row + 1])
        alone = prefill(case, case.query[1:][mine], rows_of(case.batch, row + 1, row + 2, 0))
        assert torch.equal(alone, together[mine])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_row_is_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 96, generator=generator).to(dtype)
    weight = OPS.pack_weight(torch.randn(200, 96, generator=generator).to(dtype))
    together = OPS.linear(x, weight, None)
    for rows in (1, 2, 7, 33):
        assert torch.equal(OPS.linear(x[:rows], weight, None), together[:rows])
