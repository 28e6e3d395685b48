"""Many requests with random faults and client disconnects: right tokens, and no block is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

from support.pd import GREEDY, ask, instance, prompt_of
from support.pd_transport import Gate
from support.push import PushPair, ask_pushed, push_pair

from mooncake_kv.params import KVTransferDict

NUM_REQUESTS = 150
NUM_PROMPTS = 12
AT_ONCE = 12
PROMPTS = [prompt_of(20 + 37 * index, seed=index) for index in range(NUM_PROMPTS)]


def test_random_faults_leak_no_blocks_and_change_no_token(model: Path, gate: Gate) -> None:
    asyncio.run(_soak(model, gate, random.Random(7)))


async def _soak(model: Path, gate: Gate, dice: random.Random) -> None:
    async with instance(model) as single:
        expected = [(await ask(single, prompt)).tokens for prompt in PROMPTS]
    options = {"transports": ("gated",), "max_num_batched_tokens": 64, "num_kv_blocks": 160}
    async with push_pair(model, lease_s=1.0, transfer_timeout_s=1.0, **options) as both:
        send_all = both.metaserver.dispatch
        _lose_some_prefills(both, dice)
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> bool:
            index = number % NUM_PROMPTS
            async with places:
                gate.num_failures += dice.random() < 0.1
                gate.delay_s = dice.choice([0.0, 0.0, 0.02])
                timeout_s = dice.choice([30.0, 30.0, 30.0, 0.05, 0.2])
                with contextlib.suppress(asyncio.TimeoutError):
                    answer = await asyncio.wait_for(ask_pushed(both, PROMPTS[index]), timeout_s)
                    assert answer.tokens == expected[index], f"request {number}"
                    return True
                return False

        answered = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
        gate.num_failures, gate.delay_s = 0, 0.0
        both.metaserver.dispatch = send_all
        await both.check_clean()
        failures = both.decode.stat("load_failures")
        assert sum(answered) >= NUM_REQUESTS / 2
        assert 0 < failures < NUM_REQUESTS / 2
        assert (await ask_pushed(both, PROMPTS[3])).tokens == expected[3]
        assert both.decode.stat("load_failures") == failures


def _lose_some_prefills(both: PushPair, dice: random.Random) -> None:
    """Of all prefills, one in ten is never sent, and one in ten is broken off by the proxy."""
    dispatch = both.dispatch

    async def sometimes(key: str, params: KVTransferDict) -> None:
        luck = dice.random()
        if luck < 0.1:
            return
        if luck > 0.9:
            with contextlib.suppress(asyncio.TimeoutError):
                sent = both.waiting[key]
                await asyncio.wait_for(ask(both.prefill, sent.prompt, GREEDY, params), 0.02)
            return
        await dispatch(key, params)

    both.metaserver.dispatch = sometimes
