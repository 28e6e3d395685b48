"""Disaggregated prefill and decode on NPUs over hccs: the CPU's tokens with both connectors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.changed_logits import check_changed_logits
from support.npu import FEW, ON_NPU, OVER_HCCS, clear_cases, cpu
from support.pd import ask, instance
from support.push import WAYS

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(600)]
TINY_LLAMA = Path(__file__).parents[3] / "examples" / "tiny-llama"


def test_npu_and_cpu_give_the_same_tokens() -> None:
    async def main() -> None:
        async with cpu(TINY_LLAMA) as on_cpu, instance(TINY_LLAMA, **ON_NPU) as on_npu:
            for case in await clear_cases(on_cpu):
                assert (await ask(on_npu, case.prompt, FEW)).tokens == case.tokens

    asyncio.run(main())


def test_logits_are_changed_with_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    check_changed_logits(TINY_LLAMA, monkeypatch, ON_NPU, tolerance=0.2)


@pytest.mark.parametrize("how", WAYS)
def test_disaggregated_prefill_and_decode(how: str) -> None:
    make, send = WAYS[how]

    async def main() -> None:
        async with cpu(TINY_LLAMA) as on_cpu, make(TINY_LLAMA, **OVER_HCCS) as both:
            cases = await clear_cases(on_cpu, (17, 300))
            for case in cases:
                assert (await send(both, case.prompt, FEW)).tokens == case.tokens
            assert both.decode.stat("loads") == len(cases)
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())
