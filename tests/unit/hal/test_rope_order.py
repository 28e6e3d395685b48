"""Rope rows are converted between pairs and halves in place, and only for the given tokens."""

from __future__ import annotations

import pytest
import torch

from mooncake_hal.backend_parts import convert_rope_order
from mooncake_hal.latents import HALVES, PAIRS

BLOCKS = (3, 0, 5)
BLOCK_SIZE, DIM = 4, 8


def planes(dtype: torch.dtype) -> list[torch.Tensor]:
    """Planes of two layers; the second one is a slice of wider rows."""
    torch.manual_seed(0)
    rows = torch.randn(2, 6, BLOCK_SIZE, 1, DIM + 3).to(dtype)
    return [rows[0, ..., :DIM].contiguous(), rows[1, ..., 3:]]


def bits(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(torch.uint8) if plane.element_size() == 1 else plane


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pairs_become_halves_for_the_given_tokens(dtype: torch.dtype) -> None:
    converted, before = planes(dtype), [bits(plane).clone() for plane in planes(dtype)]
    convert_rope_order(converted, BLOCKS, (2, 9), PAIRS)
    for plane, old in zip(converted, before, strict=True):
        wanted = old.clone()
        for token in range(2, 9):
            block, offset = BLOCKS[token // BLOCK_SIZE], token % BLOCK_SIZE
            row = old[block, offset, 0]
            wanted[block, offset, 0] = torch.cat((row[0::2], row[1::2]))
        assert torch.equal(bits(plane), wanted)


def test_conversion_round_trips() -> None:
    converted = planes(torch.bfloat16)
    convert_rope_order(converted, BLOCKS, (0, 12), HALVES)
    assert not torch.equal(converted[0], planes(torch.bfloat16)[0])
    convert_rope_order(converted, BLOCKS, (0, 12), PAIRS)
    for plane, old in zip(converted, planes(torch.bfloat16), strict=True):
        assert torch.equal(plane, old)


def test_no_tokens_convert_nothing() -> None:
    converted = planes(torch.float32)
    convert_rope_order(converted, (), (0, 0), PAIRS)
    assert torch.equal(converted[0], planes(torch.float32)[0])
