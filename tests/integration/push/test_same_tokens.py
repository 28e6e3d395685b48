"""What a pushed request says is what one instance says, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.pd import Instance, ask, instance, prompt_of
from support.push import PushPair, ask_pushed, push_pair

from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
CHUNK = 64
"""Tokens per step: longer prompts are prefilled, and sent, in several."""

Scenario = Callable[[Instance, PushPair], Coroutine[Any, Any, None]]


def run(model: Path, scenario: Scenario, **options: Any) -> None:
    """Run a scenario on a single instance and a pair; afterwards every block is back."""

    async def main() -> None:
        async with instance(model) as single, push_pair(model, **options) as both:
            await scenario(single, both)
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prompts_of_every_length(model: Path, transport: str) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (1, 2, 15, 16, 17, 32, 63, 64, 65, 200, 499):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            found = await ask_pushed(both, prompt)
            assert found.tokens == expected.tokens, f"prompt of {length} tokens"
            assert found.finish is expected.finish is FinishReason.LENGTH
        assert both.decode.stat("loads") == 11
        assert both.decode.stat("load_failures") == 0
        assert both.decode.stat("bytes_received") == both.prefill.stat("bytes_sent") > 0

    run(model, scenario, transports=(transport,), max_num_batched_tokens=CHUNK)
