"""Prefill over pipeline stages: KV of every stage reaches the decode instance, by both connectors.

``ci/test_grid.py`` has more sizes.
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
SIZES = [
    (PULL, (2, 2), (1, 1), "2-heads"),
    (LAYERWISE, (2, 2), (1, 1), "2-heads"),
    (PULL, (2, 1), (1, 2), "latent"),
    (LAYERWISE, (2, 1), (1, 1), "latent"),
    pytest.param(PULL, (2, 1), (2, 1), "24-heads", marks=slow),
    pytest.param(LAYERWISE, (1, 1), (2, 1), "24-heads", marks=slow),
    pytest.param(LAYERWISE, (2, 1), (1, 3), "24-heads", marks=slow),
]
"""Connector, stages and ranks of a stage on either side, model."""


@pytest.mark.parametrize(("connector", "prefill", "decode", "name"), SIZES)
def test_stages_say_the_same(
    tmp_path: Path, connector: str, prefill: tuple[int, int], decode: tuple[int, int], name: str
) -> None:
    async def main() -> None:
        model = write_grid_model(tmp_path / "model", name)
        async with instance(model) as single:
            questions = await make_questions(single, seed=0)
        sizes = [{"pp_size": pp_size, "tp_size": tp_size} for pp_size, tp_size in (prefill, decode)]
        async with (
            side(model, Role.PREFILL, connector, block_size=32, **sizes[0]) as first,
            side(model, Role.DECODE, connector, block_size=16, **sizes[1]) as second,
        ):
            await check_pair(Pair(first, second), questions)
            await first.check_clean(30.0)

    asyncio.run(main())
