"""A request that exceeds its timeout ends in any state, and its memory is freed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.pd import Instance, ask, instance, pair, prefill, prompt_of, write_model

from mooncake_engine.kv_connector import read_kv_transfer_params
from mooncake_engine.messages import EngineRequest, FinishReason, TokenUpdate
from mooncake_engine.sampling_params import SamplingParams

ENDLESS = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("random"))


async def last_update(
    where: Instance, timeout_s: float, params: dict[str, Any] | None = None
) -> TokenUpdate:
    kv_params = read_kv_transfer_params(params, prompt_of(40))
    request = EngineRequest("late", prompt_of(40), ENDLESS, kv_params, timeout_s=timeout_s)
    async with aclosing(where.engine.generate(request)) as updates:
        return [update async for update in updates][-1]


def check(update: TokenUpdate, timeout_s: float) -> None:
    assert update.finish is FinishReason.TIMEOUT
    assert update.error == f"not finished within {timeout_s:g} s, the request's own timeout"


@pytest.mark.parametrize("timeout_s", [1e-6, 0.02])
def test_waiting_and_running_requests_time_out(model_dir: Path, timeout_s: float) -> None:
    async def scenario() -> None:
        async with instance(model_dir) as single:
            late, other = await asyncio.gather(
                last_update(single, timeout_s), ask(single, prompt_of(9))
            )
            check(late, timeout_s)
            assert other.finish is FinishReason.LENGTH
            await single.check_clean()

    asyncio.run(scenario())


def test_timeout_on_either_side_of_transfer(model_dir: Path) -> None:
    async def scenario() -> None:
        async with pair(model_dir) as both:
            order = {"do_remote_decode": True}
            check(await last_update(both.prefill, 1e-6, order), 1e-6)
            for timeout_s in (1e-6, 0.005, 0.05):
                params = await prefill(both.prefill, prompt_of(40), ENDLESS)
                check(await last_update(both.decode, timeout_s, params), timeout_s)
            await both.check_clean()

    asyncio.run(scenario())
