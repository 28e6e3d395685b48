"""A prefill instance keeps the rope rows of latents as pairs, as vLLM does: a decode instance that
pulls them turns them, and says what one instance says.

P is an instance of ours whose rows are turned by hand before anybody reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.pd import Instance, ask, instance, prefill, prompt_of, write_model

from mooncake_engine.config import Role
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.kv_connector import read_kv_transfer_params
from mooncake_hal.backend_parts import turn_rope
from mooncake_hal.latents import HALVES, PAIRS
from mooncake_kv.numerics import ROPE_ORDER
from mooncake_kv.params import KVTransferDict

KEEPS_PAIRS = patch.object(EnginePlan, "kv_meaning", property(lambda _: {ROPE_ORDER: PAIRS}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3")


async def prefill_as_pairs(where: Instance, prompt: Sequence[int]) -> KVTransferDict:
    """Prefill a prompt, whose rope rows a peer finds as pairs."""
    answer = await prefill(where, prompt)
    executor = where.core._executor
    assert isinstance(executor, InProcessExecutor)
    planes = executor._worker.pool.planes
    remote = read_kv_transfer_params(answer, prompt).remote
    assert remote is not None
    turn_rope(planes[1], remote.block_ids, (0, remote.num_tokens), HALVES)
    return answer


@pytest.mark.parametrize(
    "decode",
    [{}, {"tp_size": 2, "block_size": 8}, {"kv_pool": "dram=8M,chunk=32"}],
    ids=["alike", "ranks", "pool"],
)
def test_a_reader_turns_what_it_pulls(model: Path, decode: dict[str, Any]) -> None:
    async def main() -> None:
        async with instance(model) as single:
            expected = {length: await ask(single, prompt_of(length)) for length in (1, 16, 17, 150)}
        async with AsyncExitStack() as stack:
            with KEEPS_PAIRS:
                first = await stack.enter_async_context(
                    instance(model, Role.PREFILL, prefix_caching=False)
                )
            second = await stack.enter_async_context(instance(model, Role.DECODE, **decode))
            for length, wanted in expected.items():
                for _ in range(2):  # the second time from its own prefix cache
                    params = await prefill_as_pairs(first, prompt_of(length))
                    found = await ask(second, prompt_of(length), params=params)
                    assert (found.tokens, found.error) == (wanted.tokens, None)
            assert second.stat("load_failures") == 0
            assert second.stat("bytes_received") > 0
            await second.check_clean()
            await first.check_clean()

    asyncio.run(main())
