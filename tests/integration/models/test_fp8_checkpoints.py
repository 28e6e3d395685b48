"""fp8 checkpoints on devices without fp8 matrix multiplication: the tokens of the dequantised
model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fp8_checkpoints import FORMS, WHOLE_BLOCKS, write_fp8
from support.pd import GREEDY, ask, ask_pair, instance, pair, prompt_of, write_model

DRAWN = replace(GREEDY, temperature=0.9, seed=7)
LENGTHS = ((5, GREEDY), (150, DRAWN))
BIG = {"deepseek_v3": {}, "llama": WHOLE_BLOCKS, "qwen3_moe": WHOLE_BLOCKS}


def made(tmp_path: Path, family: str, form: str) -> tuple[Path, Path]:
    plain = write_model(tmp_path / "plain", family, **BIG[family])
    return write_fp8(plain, tmp_path / "model", form)


async def tokens_of(model: Path, **options: Any) -> list[list[int]]:
    async with instance(model, **options) as single:
        return [(await ask(single, prompt_of(n), sampling)).tokens for n, sampling in LENGTHS]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", BIG)
def test_tokens_match_dequantised_model(
    tmp_path: Path, family: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fallback is logged once, with the reason."""
    model, twin = made(tmp_path, family, form)
    found = asyncio.run(tokens_of(model))
    messages = [r.message for r in caplog.records if "are dequantised to float32" in r.message]
    assert len(messages) == 1
    assert "backend 'cpu' does not support fp8 on this device" in messages[0]
    assert found == asyncio.run(tokens_of(twin))


def test_two_ranks_give_same_tokens(tmp_path: Path) -> None:
    model, twin = made(tmp_path, "llama", "blocks")
    assert asyncio.run(tokens_of(model, tp_size=2)) == asyncio.run(tokens_of(twin))


@pytest.mark.parametrize("form", ["blocks", "channel"])
def test_pair_gives_same_tokens(tmp_path: Path, form: str) -> None:
    model, twin = made(tmp_path, "llama", form)

    async def apart() -> list[list[int]]:
        async with pair(model) as both:
            answers = [await ask_pair(both, prompt_of(n), sampling) for n, sampling in LENGTHS]
            assert both.decode.stat("loads") == len(LENGTHS)
            return [answer.tokens for answer in answers]

    assert asyncio.run(apart()) == asyncio.run(tokens_of(twin))
