"""Early pulls: D reserves blocks before P computes, and reads while P does; every way to end in
between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
from support.pd import GREEDY, ask, instance, pair, prompt_of, wait_until
from support.pd_transport import Gate
from support.push import PULLING, PushPair, ask_pushed, early_pull_pair

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import FinishReason
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import KVTransferDict

PROMPT = prompt_of(450)
SLOW = {"max_num_batched_tokens": 1}
"""One step per token, so that the test can observe P while it computes."""
GATED = {"transports": ("gated",)}

Scenario = Callable[[list[int], PushPair], Coroutine[None, None, None]]


def run(model: Path, scenario: Scenario, **options: object) -> None:
    """Run a scenario on a pair, given a single instance's answer; afterwards all blocks are
    free."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with early_pull_pair(model, **options) as both:
            await scenario(expected, both)
            await both.check_clean()

    asyncio.run(main())


def test_reads_start_before_prefill_completes(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.close()
        pending = asyncio.create_task(ask_pushed(both, PROMPT))
        await wait_until(lambda: gate.num_held > 0, 20)
        assert both.prefill.engine.stats().num_running == 1, "D reads, and P computes"
        assert both.prefills == {}, "P has not responded"
        gate.open()
        assert (await pending).tokens == expected
        assert both.decode.stat("bytes_received_early") > 0.9 * both.decode.stat("bytes_received")
        assert both.decode.stat("load_failures") == 0

    run(model, scenario, prefill=SLOW, **GATED)


def test_blocks_are_reserved_before_prefill_starts(model: Path) -> None:
    """D has blocks for one such request: the other's prefill is not even requested."""

    async def scenario(expected: list[int], both: PushPair) -> None:
        long = replace(GREEDY, max_tokens=40)
        first = asyncio.create_task(ask_pushed(both, PROMPT, long))
        await wait_until(lambda: both.decode.engine.stats().num_running == 1, 20)
        second = asyncio.create_task(ask_pushed(both, PROMPT[::-1]))
        await wait_until(lambda: both.decode.engine.stats().num_waiting == 1, 20)
        assert len(both.waiting) == 1, "P has not received the request"
        assert (await first).tokens[: len(expected)] == expected
        assert (await second).finish is FinishReason.LENGTH
        assert both.decode.stat("load_failures") == 0

    run(model, scenario, decode={"num_kv_blocks": 36}, prefix_caching=False)


def test_client_disconnect_during_prefill(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.close()
        pending = asyncio.create_task(ask_pushed(both, PROMPT))
        await wait_until(lambda: gate.num_held > 0, 20)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        gate.open()
        await both.check_clean(30.0)
        assert both.decode.stat("load_failures") == 0
        assert (await ask_pushed(both, PROMPT)).tokens == expected

    run(model, scenario, prefill=SLOW, **GATED)


def test_aborted_prefill_is_computed_by_decode_instance(model: Path) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        async def go_away(key: str, params: KVTransferDict) -> None:
            pending = asyncio.create_task(ask(both.prefill, PROMPT, GREEDY, params))
            await wait_until(lambda: both.decode.stat("bytes_received") > 0, 20)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

        both.metaserver.dispatch = go_away
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, prefill=SLOW)


def test_prompt_of_stopped_prefill_instance_is_computed_by_decode(model: Path) -> None:
    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with early_pull_pair(model, prefill=SLOW, lease_s=1.0) as both:
            pending = asyncio.create_task(ask_pushed(both, PROMPT))
            await wait_until(lambda: both.decode.stat("bytes_received") > 0, 20)
            both.metaserver.is_failure_expected = True
            await asyncio.to_thread(both.prefill.engine.close)
            assert (await pending).tokens == expected
            assert both.decode.stat("load_failures") == 1
            await both.decode.check_clean()

    asyncio.run(main())


def test_stopped_decode_instance_frees_prefill_blocks(model: Path) -> None:
    async def main() -> None:
        async with early_pull_pair(model, prefill=SLOW, lease_s=1.0) as both:
            pending = asyncio.create_task(ask_pushed(both, PROMPT))
            await wait_until(lambda: both.decode.stat("bytes_received") > 0, 20)
            await asyncio.to_thread(both.decode.engine.close)
            await asyncio.gather(pending, return_exceptions=True)
            await both.prefill.check_clean(30.0)

    asyncio.run(main())


def test_preempted_prefill_is_read_again(model: Path) -> None:
    """A decoding request on P takes the blocks of the younger prompt."""

    async def scenario(expected: list[int], both: PushPair) -> None:
        older = asyncio.create_task(
            ask(both.prefill, prompt_of(40), replace(GREEDY, max_tokens=120))
        )
        await wait_until(lambda: both.prefill.engine.stats().num_running == 1, 20)
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.prefill.engine.stats().num_preemptions == 1
        assert both.decode.stat("load_failures") == 0
        await older

    limits = {"num_kv_blocks": 34, "max_num_batched_tokens": 8, "min_prefill_chunk": 1}
    run(model, scenario, prefill=limits, prefix_caching=False)


def test_prompt_of_failed_read_is_computed_by_decode(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.num_failures = 1
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, prefill={"max_num_batched_tokens": 64}, **GATED)


@pytest.mark.parametrize("status", [404, 500])
def test_metaserver_rejection_ends_the_wait(model: Path, status: int) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        answer = await ask_pushed(both, PROMPT)
        assert answer.finish is FinishReason.ERROR
        assert f"answered {status}, not 202" in str(answer.error)

    run(model, scenario, status=status, decode={"load_failure": LoadFailurePolicy.FAIL})


def test_params_of_other_flow_are_rejected(model: Path) -> None:
    async def main() -> None:
        async with pair(model, connector="MooncakeLayerwiseConnector") as both:
            params = {"do_remote_prefill": True, "metaserver": "http://127.0.0.1:1/"}
            with pytest.raises(InvalidRequest, match=r"request a pull, .* does a push"):
                await ask(both.decode, PROMPT, GREEDY, {**params, "do_pull": True})
        async with pair(model, connector=PULLING) as both:
            with pytest.raises(InvalidRequest, match=r"request a push, .* does a pull"):
                await ask(both.decode, PROMPT, GREEDY, params)

    asyncio.run(main())
