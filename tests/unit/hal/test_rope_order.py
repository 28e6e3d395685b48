"""Rope rows of one order become those of the other, in place, and only those that are named."""

from __future__ import annotations

import pytest
import torch

from mooncake_hal.backend_parts import convert_rope_order
from mooncake_hal.latents import HALVES, PAIRS

BLOCKS = (3, 0, 5)
BLOCK_SIZE, DIM = 4, 8


def planes(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of two layers, the second one part of wider rows."""
    torch.manual_seed(0)
    rows = torch.randn(2, 6, BLOCK_SIZE, 1, DIM + 3).to(dtype)
    return [rows[0, ..., :DIM].contiguous(), rows[1, ..., 3:]]


def bits(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(torch.uint8) if plane.element_size() == 1 else plane


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pairs_become_halves_where_the_tokens_are(dtype: torch.dtype) -> None:
    turned, before = planes(dtype), [bits(plane).clone() for plane in planes(dtype)]
    convert_rope_order(turned, BLOCKS, (2, 9), PAIRS)
    for plane, old in zip(turned, before, strict=True):
        wanted = old.clone()
        for token in range(2, 9):
            block, offset = BLOCKS[token // BLOCK_SIZE], token % BLOCK_SIZE
            row = old[block, offset, 0]
            wanted[block, offset, 0] = torch.cat((row[0::2], row[1::2]))
        assert torch.equal(bits(plane), wanted)


def test_back_again_is_what_was_there() -> None:
    turned = planes(torch.bfloat16)
    convert_rope_order(turned, BLOCKS, (0, 12), HALVES)
    assert not torch.equal(turned[0], planes(torch.bfloat16)[0])
    convert_rope_order(turned, BLOCKS, (0, 12), PAIRS)
    for plane, old in zip(turned, planes(torch.bfloat16), strict=True):
        assert torch.equal(plane, old)


def test_no_tokens_are_no_work() -> None:
    turned = planes(torch.float32)
    convert_rope_order(turned, (), (0, 0), PAIRS)
    assert torch.equal(turned[0], planes(torch.float32)[0])
