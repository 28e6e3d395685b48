"""Truncation of prompts."""

from __future__ import annotations

import pytest

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineInfo
from mooncake_engine.text.limits import Truncation

FACTS = EngineInfo(64, 50, (3,), 16, 16, "engine")
TEXT = (5, 6, 7, 8, 9)
AROUND = (1, *TEXT, 2)
"""The tokens of a text between two special tokens."""


@pytest.mark.parametrize(
    ("num_tokens", "side", "remaining"),
    [
        (7, None, AROUND),
        (6, None, (1, 6, 7, 8, 9, 2)),
        (3, None, (1, 9, 2)),
        (2, None, (9, 2)),
        (0, None, ()),
        (9, "left", AROUND),
        (6, "left", (*TEXT, 2)),
        (1, "left", (2,)),
        (0, "left", ()),
        (6, "right", (1, *TEXT)),
        (0, "right", ()),
    ],
)
def test_special_tokens_stay_unless_a_side_is_named(
    num_tokens: int, side: str | None, remaining: tuple[int, ...]
) -> None:
    assert Truncation(num_tokens, side).of_text(AROUND, lambda: TEXT) == remaining


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_tokens_are_cut_without_regard_to_their_meaning(side: str | None) -> None:
    expected = AROUND[:4] if side == "right" else AROUND[-4:]
    assert Truncation(4, side).of_tokens(AROUND) == expected
    assert Truncation(9, side).of_tokens(AROUND) == AROUND


def test_minus_one_leaves_room_for_one_output_token() -> None:
    assert Truncation.of(-1, None, FACTS) == Truncation(63)
    assert Truncation.of(64, "left", FACTS) == Truncation(64, "left")
    assert Truncation.of(None, "left", FACTS) is None
    for wrong in (-2, 65):
        with pytest.raises(InvalidRequest, match=r"must be in \[-1, 64\], got"):
            Truncation.of(wrong, None, FACTS)
