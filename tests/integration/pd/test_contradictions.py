"""Parameters that contradict an instance's own metadata are rejected, naming both values."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.pd import ask, pair, prefill, prompt_of

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import FinishReason
from mooncake_kv.config import LoadFailurePolicy

PROMPT = prompt_of(50)


def test_other_prompt_of_same_length_is_rejected(model: Path) -> None:
    """A proxy that swaps two requests: without the check, D would decode from foreign KV."""

    async def scenario() -> None:
        async with pair(model) as both:
            params = await prefill(both.prefill, PROMPT)
            with pytest.raises(InvalidRequest, match="given another prompt of 50 tokens"):
                await ask(both.decode, prompt_of(50, seed=1), params=params)
            assert (await ask(both.decode, PROMPT, params=params)).finish is FinishReason.LENGTH
            await both.check_clean()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("remote_block_size", 128, "a block size of 128, it has 16"),
        ("remote_ptp_size", 4, "a tensor-parallel size of 4, it has 1"),
    ],
)
def test_wrong_metadata_of_prefill_instance_is_rejected(
    model: Path, field: str, value: int, message: str
) -> None:
    async def scenario() -> None:
        fails = {"load_failure": LoadFailurePolicy.FAIL}
        async with pair(model, decode=fails) as both:
            params = await prefill(both.prefill, PROMPT)
            answer = await ask(both.decode, PROMPT, params={**params, field: value})
            assert answer.finish is FinishReason.ERROR
            assert message in str(answer.error)
            await both.check_clean()

    asyncio.run(scenario())
