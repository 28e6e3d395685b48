"""Unequal tensor-parallel sizes, ranks as processes. ``ci/test_grid.py`` has all pairs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.pd import Pair
from support.pd_grid import PULL, Setting, check_pair, expected_answers, side, write_grid_model
from support.push import LAYERWISE

from mooncake_engine.config import Role

slow = pytest.mark.slow
RATIOS = [
    (PULL, 2, 1, 2),
    (PULL, 1, 2, 24),
    pytest.param(PULL, 3, 2, 2, marks=slow),
    pytest.param(PULL, 2, 4, 2, marks=slow),
    pytest.param(PULL, 4, 3, 24, marks=slow),
    pytest.param(LAYERWISE, 2, 1, 24, marks=slow),
    pytest.param(LAYERWISE, 1, 2, 2, marks=slow),
    pytest.param(LAYERWISE, 3, 2, 2, marks=slow),
    pytest.param(LAYERWISE, 2, 4, 24, marks=slow),
]


@pytest.mark.parametrize(("connector", "prefill_tp", "decode_tp", "kv_heads"), RATIOS)
def test_unequal_sizes_say_the_same(
    tmp_path: Path, connector: str, prefill_tp: int, decode_tp: int, kv_heads: int
) -> None:
    setting = Setting(connector, kv_heads, (32, 16))

    async def main() -> None:
        model = write_grid_model(tmp_path / "model", kv_heads)
        expected = await expected_answers(model)
        async with (
            side(model, Role.PREFILL, setting, prefill_tp) as first,
            side(model, Role.DECODE, setting, decode_tp) as second,
        ):
            await check_pair(Pair(first, second), setting, expected)

    asyncio.run(main())
