"""A P that stores rope rows of latents interleaved, as vLLM does, and a D that reorders them.

The tokens are those of one instance, pulled or pushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support.pd
from support.pd import Instance, ask, prompt_of, write_model
from support.push import WAYS, run_beside_one
from torch import Tensor

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.models.layers import ParallelContext
from mooncake_hal.latents import HALVES, PAIRS, ComposedLatentWrites
from mooncake_kv.numerics import ROPE_ORDER

LENGTHS = (1, 16, 17, 150)


class KeepsPairs:
    """Ops that reorder the output of ``rope``, of queries and of rows, before it is stored."""

    write_latents = ComposedLatentWrites.write_latents

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rope(self, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        query, key = self._ops.rope(*arguments)
        return as_pairs(query), as_pairs(key)


def as_pairs(halves: Tensor) -> Tensor:
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3")


@pytest.fixture
def prefill_keeps_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Instances with the prefill role store pairs and publish that they do; others don't."""
    build_engine, latent_ops = support.pd.build_engine, ParallelContext.latent_ops
    meaning = EnginePlan.kv_meaning.fget
    assert meaning is not None
    roles: list[Role] = []

    def build(config: EngineConfig) -> Any:
        roles.append(config.role)
        return build_engine(config)

    def ops_of(parallel: ParallelContext, layer: int) -> Any:
        ops = latent_ops(parallel, layer)
        return KeepsPairs(ops) if roles[-1] is Role.PREFILL else ops

    def means(plan: EnginePlan) -> dict[str, str]:
        order = PAIRS if plan.config.role is Role.PREFILL else HALVES
        return {**meaning(plan), ROPE_ORDER: order}

    monkeypatch.setattr(support.pd, "build_engine", build)
    monkeypatch.setattr(ParallelContext, "latent_ops", ops_of)
    monkeypatch.setattr(EnginePlan, "kv_meaning", property(means))
    yield
    assert roles == [Role.BOTH, Role.PREFILL, Role.DECODE]


@pytest.mark.usefixtures("prefill_keeps_pairs")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "decode",
    [{}, {"tp_size": 2, "block_size": 8}, {"kv_pool": "dram=8M,chunk=32"}],
    ids=["alike", "ranks", "pool"],
)
def test_rope_rows_are_reordered_before_use(model: Path, way: str, decode: dict[str, Any]) -> None:
    make_both, ask_both = WAYS[way]

    async def scenario(single: Instance, both: Any) -> None:
        for length in LENGTHS:
            expected = await ask(single, prompt_of(length))
            for _ in range(2):  # the second time, D has blocks of the prompt
                found = await ask_both(both, prompt_of(length))
                assert (found.tokens, found.error) == (expected.tokens, None)
        assert both.decode.stat("load_failures") == 0
        assert both.decode.stat("bytes_received") > 0

    limits = {"max_num_batched_tokens": 64, "prefix_caching": False}
    run_beside_one(make_both, model, scenario, prefill=limits, decode=decode)
