"""Every kernel once, with a model's shapes: what compute-sanitizer looks at."""

from __future__ import annotations

import pytest
import torch
from support.cuda_shapes import EXPERTS, GROUPED, LATENT_HEADS, Shapes

from mooncake_hal.backend import Backend

pytestmark = pytest.mark.cuda


@pytest.fixture(params=["bfloat16", "float16"])
def shapes(cuda: Backend, request: pytest.FixtureRequest) -> Shapes:
    # zeros: lengths and ids are then valid, whatever they index
    return Shapes(cuda.ops, getattr(torch, request.param), device="cuda:0", make=torch.zeros)


@pytest.mark.parametrize("model", GROUPED)
def test_grouped(shapes: Shapes, model: str) -> None:
    for part in (shapes.rows, shapes.blocks, shapes.grouped):
        part(GROUPED[model])
    torch.cuda.synchronize()


@pytest.mark.parametrize("model", LATENT_HEADS)
def test_latents(shapes: Shapes, model: str) -> None:
    shapes.latent(LATENT_HEADS[model])
    torch.cuda.synchronize()


def test_experts(shapes: Shapes) -> None:
    shapes.experts(EXPERTS["Mixtral-8x7B"])
    torch.cuda.synchronize()
