"""Drawing tokens by the kernel, interpreted, against float64 on sorted probabilities."""

from __future__ import annotations

import pytest
import torch
from support.triton_interpreter import repair
from torch import Tensor

from mooncake_hal_cuda.sampling import Drawing, draw

VOCAB = 3000


@pytest.fixture(autouse=True, scope="module")
def repaired() -> None:
    repair()


def wanted(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities that a row's filters leave: [vocab] float64."""
    weights = ((logits - logits.max()) / temperature).exp().double()
    weights[weights < min_p] = 0
    if top_k:
        weights[weights < weights.topk(top_k).values[-1]] = 0
    ordered = weights.sort(descending=True).values
    reached = (ordered.cumsum(0) < top_p * weights.sum()).sum().clamp(max=VOCAB - 1)
    weights[weights < ordered[reached]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("top_k", [0, 1, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_draws(top_k: int, top_p: float, min_p: float) -> None:
    uniforms = torch.tensor([0.0, 0.2, 0.5, 0.999999], dtype=torch.float64)
    temperatures = torch.tensor([0.7, 1.0, 1.3, 2.0])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(top_k)) * 3
    logits[:, 7] = logits.amax(1)  # a tie, at the top
    logits[:, 100:200] = float("-inf")
    same = torch.ones(4)
    drawing = Drawing(temperatures, same.int() * top_k, same * top_p, same * min_p, uniforms)
    found = draw(logits, drawing)
    for row, token in enumerate(found.tolist()):
        kept = wanted(logits[row], float(temperatures[row]), top_k, top_p, min_p)
        running = kept.cumsum(0)
        assert kept[token] > 0
        assert running[token] > uniforms[row] - 1e-6
        assert running[token] - kept[token] <= uniforms[row] + 1e-6


def test_no_temperature_takes_the_first_of_the_largest() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, [5, 17]] = 50.0
    zero = torch.zeros(3)
    drawing = Drawing(zero, zero.int(), zero + 1, zero, zero.double() + 0.99)
    assert draw(logits, drawing).tolist() == logits.argmax(1).tolist()


def test_nobody_draws_nothing() -> None:
    none = torch.empty(0)
    drawing = Drawing(none, none.int(), none, none, none.double())
    assert draw(torch.empty(0, VOCAB), drawing).shape == (0,)
