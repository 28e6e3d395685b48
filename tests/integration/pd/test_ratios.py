"""P and D of different sizes, with ranks as processes: tensor-parallel ranks, pipeline stages, and
data-parallel ranks of them.

``ci/test_grid.py`` covers all pairs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.pd import Pair, instance
from support.pd_grid import PULL, check_pair, make_questions, side, write_grid_model
from support.push import LAYERWISE

from mooncake_engine.config import Role

slow = pytest.mark.slow
RATIOS = [
    (PULL, "2", "1", "2-heads"),
    (PULL, "1", "2", "24-heads"),
    (PULL, "2x2", "1", "2-heads"),
    (LAYERWISE, "2x2", "1", "2-heads"),
    (PULL, "2x1", "2", "latent"),
    (LAYERWISE, "2x1", "1", "latent"),
    (PULL, "2e2", "2d1e2", "experts"),
    (LAYERWISE, "2d1e2", "2d1", "latent-experts"),
    pytest.param(PULL, "3", "2", "2-heads", marks=slow),
    pytest.param(PULL, "2", "4", "2-heads", marks=slow),
    pytest.param(PULL, "4", "3", "24-heads", marks=slow),
    pytest.param(PULL, "2x1", "2x1", "24-heads", marks=slow),
    pytest.param(LAYERWISE, "2", "1", "24-heads", marks=slow),
    pytest.param(LAYERWISE, "1", "2", "2-heads", marks=slow),
    pytest.param(LAYERWISE, "3", "2", "2-heads", marks=slow),
    pytest.param(LAYERWISE, "2", "4", "24-heads", marks=slow),
]
"""Sizes as ``read_size`` takes them."""


@pytest.mark.parametrize(("connector", "prefill", "decode", "name"), RATIOS)
def test_unequal_sizes_give_same_tokens(
    tmp_path: Path, connector: str, prefill: str, decode: str, name: str
) -> None:
    async def main() -> None:
        model = write_grid_model(tmp_path / "model", name)
        async with instance(model) as single:
            questions = await make_questions(single, seed=0)
        async with (
            side(model, Role.PREFILL, connector, size=prefill, block_size=32) as first,
            side(model, Role.DECODE, connector, size=decode, block_size=16) as second,
        ):
            await check_pair(Pair(first, second), questions)
            await first.check_clean(30.0)

    asyncio.run(main())
