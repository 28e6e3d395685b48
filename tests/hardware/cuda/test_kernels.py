"""Runs every kernel once with a model's shapes, for compute-sanitizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda_shapes import (
    EXPERTS,
    GROUPED,
    LATENT_HEADS,
    Shapes,
    argmax_rows,
    sample_rows,
)

from mooncake_hal.backend import Backend
from mooncake_hal_cuda.one_shot_all_reduce import BUFFER_BYTES, DTYPES, OneShotAllReduce
from mooncake_hal_cuda.transports.device_copier import WITHIN, launch_copy

pytestmark = pytest.mark.cuda


@pytest.fixture(params=["bfloat16", "float16"])
def shapes(cuda: Backend, request: pytest.FixtureRequest) -> Shapes:
    # zeros: lengths and ids are then valid, whatever they index
    return Shapes(cuda.ops, getattr(torch, request.param), device="cuda:0", make=torch.zeros)


@pytest.mark.parametrize("model", GROUPED)
def test_grouped(shapes: Shapes, model: str) -> None:
    for part in (shapes.rows, shapes.single_rows, shapes.blocks, shapes.grouped):
        part(GROUPED[model])
    torch.cuda.synchronize()


@pytest.mark.parametrize("model", LATENT_HEADS)
def test_latents(shapes: Shapes, model: str) -> None:
    shapes.latent(LATENT_HEADS[model])
    torch.cuda.synchronize()


def test_experts(shapes: Shapes) -> None:
    shapes.experts(EXPERTS["Mixtral-8x7B"])
    torch.cuda.synchronize()


def test_narrow_kv(cuda: Backend) -> None:
    if not cuda.capabilities.kv_dtypes:
        pytest.skip("this generation does not convert e4m3")
    narrow = Shapes(
        cuda.ops, torch.bfloat16, "cuda:0", kv_dtype=torch.float8_e4m3fn, make=torch.zeros
    )
    narrow.blocks(GROUPED["Llama-3-8B"])
    narrow.grouped(GROUPED["Llama-3-8B"])
    narrow.latent(LATENT_HEADS["DeepSeek-V3"])
    torch.cuda.synchronize()


def test_sampling(cuda: Backend) -> None:
    sample_rows(device="cuda:0")
    argmax_rows(device="cuda:0")
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_all_reduces(cuda: Backend, dtype: torch.dtype) -> None:
    """A group of one rank, which communicates with itself: two calls of each of three sizes."""
    buffer = cuda.memory.allocate(BUFFER_BYTES, 0)
    start = buffer.region.address
    one_shot = OneShotAllReduce(0, [start], torch.device("cuda:0"), 10.0, buffer.free)
    for elements in (8, 20_000, 64) * 2:
        x = torch.randn(elements, device="cuda:0").to(dtype)
        expected = x.clone()
        assert torch.equal(one_shot.run(x), expected)
    one_shot.close()


@pytest.mark.parametrize("nbytes", [4096, 4095])
def test_spans(cuda: Backend, nbytes: int) -> None:
    """Aligned pieces and unaligned ones."""
    source = torch.arange(8 * 4096, device="cuda:0").to(torch.uint8)
    target = torch.zeros_like(source)
    offsets = np.arange(8, dtype=np.uint64) * np.uint64(4096)
    starts = (offsets + np.uint64(tensor.data_ptr()) for tensor in (target, source))
    pieces = (*starts, np.full(8, nbytes, np.uint64))
    launch_copy(source.device, *pieces, WITHIN.programs)
    copied, wanted = (tensor.view(8, 4096)[:, :nbytes] for tensor in (target, source))
    assert torch.equal(copied, wanted)
