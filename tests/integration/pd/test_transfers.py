"""Transfers that are slow, fail, deliver corrupted KV or are cancelled, by a scripted transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support import pd_transport
from support.pd import (
    GREEDY,
    Pair,
    ask,
    ask_pair,
    instance,
    pair,
    prefill,
    prompt_of,
    wait_until,
)
from support.pd_transport import Gate

from mooncake_engine.config import Role
from mooncake_engine.kv_connector import ConnectorExtension
from mooncake_engine.messages import FinishReason
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_kv.config import LoadFailurePolicy

GATED = {"transports": (pd_transport.NAME,)}
PROMPT = prompt_of(100)


def run(
    model: Path, scenario: Callable[[Pair, list[int]], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run a scenario on a pair, with a single instance's answer to PROMPT."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with pair(model, **{**GATED, **options}) as both:
            await scenario(both, expected)
            await both.check_clean()

    asyncio.run(main())


def test_first_token_is_sent_before_kv_arrives(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        params = await prefill(both.prefill, PROMPT)
        seen: list[int] = []
        answer = asyncio.create_task(
            ask(both.decode, PROMPT, GREEDY, params, lambda u: seen.extend(u.token_ids))
        )
        await wait_until(lambda: gate.num_held == 1, 5.0)
        assert seen == expected[:1]
        gate.open()
        assert (await answer).tokens == expected

    run(model, scenario)


def test_decode_instance_computes_no_prompt_token(
    model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []

    def remember(extension: ConnectorExtension, plan: StepPlan) -> None:
        if extension.context.config.role is Role.DECODE:
            plans.append(plan)

    monkeypatch.setattr(ConnectorExtension, "begin_step", remember)

    async def scenario(both: Pair, expected: list[int]) -> None:
        plans.clear()
        assert (await ask_pair(both, PROMPT)).tokens == expected
        ran = [(s.start, s.count) for plan in plans for s in plan.sequences]
        wanted = range(len(PROMPT), len(PROMPT) + len(expected) - 1)
        assert ran == [(position, 1) for position in wanted]

    run(model, scenario)


def test_corrupted_kv_changes_the_answer(model: Path, gate: Gate) -> None:
    """The control: if corruption went unnoticed, no comparison of tokens here would mean
    anything."""

    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.corrupts = True
        assert (await ask_pair(both, PROMPT)).tokens != expected

    run(model, scenario, prefix_caching=False)


def test_cancelled_load_is_no_failure_and_does_not_affect_other_loads(
    model: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        params = [await prefill(both.prefill, PROMPT) for _ in range(2)]
        answers = [asyncio.create_task(ask(both.decode, PROMPT, GREEDY, p)) for p in params]
        await wait_until(lambda: gate.num_held == 2, 5.0)
        answers[0].cancel()
        await wait_until(lambda: gate.num_held == 1, 2.0)
        gate.open()
        assert (await answers[1]).tokens == expected
        assert both.decode.stat("loads") == 2
        assert both.decode.stat("load_failures") == 0
        assert "loading the KV" not in caplog.text
        nbytes = both.decode.stat("bytes_received")
        assert nbytes > 0
        sender, receiver = (both.prefill.engine.compatibility(), both.decode.engine.compatibility())
        assert sender is not None
        assert receiver is not None
        assert receiver.bytes_received == {sender.engine_id: nbytes}

    run(model, scenario)


def test_many_stuck_loads_can_all_be_cancelled(model: Path, gate: Gate) -> None:
    """More loads than there are loader threads."""

    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        params = [await prefill(both.prefill, PROMPT) for _ in range(7)]
        answers = [asyncio.create_task(ask(both.decode, PROMPT, GREEDY, p)) for p in params]
        await wait_until(lambda: gate.num_held == 4, 5.0)
        for answer in answers:
            answer.cancel()
        await both.check_clean(within_s=5.0)
        gate.open()
        assert (await ask_pair(both, PROMPT)).tokens == expected

    run(model, scenario, lease_s=30.0, transfer_timeout_s=30.0)


def test_hung_reads_from_one_peer_delay_no_other_peer(model: Path, gate: Gate) -> None:
    async def main() -> None:
        options: dict[str, Any] = {**GATED, "lease_s": 30.0, "transfer_timeout_s": 30.0}
        async with (
            instance(model, Role.PREFILL, **options) as hanging,
            pair(model, **options) as both,
        ):
            gate.num_stuck = 4
            params = [await prefill(hanging, PROMPT) for _ in range(5)]
            stuck = [asyncio.create_task(ask(both.decode, PROMPT, GREEDY, p)) for p in params]
            await wait_until(lambda: gate.num_held == 4, 5.0)
            await asyncio.wait_for(ask_pair(both, PROMPT), 5.0)
            for task in stuck:
                task.cancel()
            await both.check_clean()
            await hanging.check_clean()

    asyncio.run(main())


POLICIES = pytest.mark.parametrize("policy", list(LoadFailurePolicy), ids=lambda p: p.value)


@POLICIES
def test_slow_transfer_times_out(model: Path, gate: Gate, policy: LoadFailurePolicy) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        await check_failed_load(both, expected, policy, "TransferTimeout")
        gate.open()
        assert (await ask_pair(both, prompt_of(60))).finish is FinishReason.LENGTH
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, transfer_timeout_s=0.3, load_failure=policy)


@POLICIES
def test_failed_transfer(model: Path, gate: Gate, policy: LoadFailurePolicy) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.num_failures = 1
        await check_failed_load(both, expected, policy, "PeerLost")
        assert (await ask_pair(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, load_failure=policy)


async def check_failed_load(
    both: Pair, expected: list[int], policy: LoadFailurePolicy, reason: str
) -> None:
    """Check that the answer has the right tokens or an error with its reason."""
    answer = await ask_pair(both, PROMPT)
    if policy is LoadFailurePolicy.RECOMPUTE:
        assert answer.tokens == expected
        return
    assert answer.finish is FinishReason.ERROR
    assert answer.tokens == expected[:1]
    assert answer.error is not None
    assert "the prompt's KV did not arrive" in answer.error
    assert reason in answer.error


def test_unknown_block_ids_fail_the_load(model: Path, gate: Gate) -> None:
    """Well-formed but wrong ids fail the load, and nothing else."""

    async def scenario(both: Pair, expected: list[int]) -> None:
        for table in ([], [0], [2**31 - 1] * 7, [100_000 + n for n in range(7)]):
            params = {**await prefill(both.prefill, PROMPT), "remote_block_ids": [table]}
            assert (await ask(both.decode, PROMPT, GREEDY, params)).tokens == expected

    run(model, scenario, prefix_caching=False)


UNREACHABLE = [
    {"remote_host": "two words"},
    {"remote_host": "*"},
    {"remote_host": "no-such-host.invalid"},
    {"remote_port": 1},
    {"remote_engine_id": "somebody-else"},
    {"remote_request_id": "some-other-request"},
]


@pytest.mark.parametrize("change", UNREACHABLE, ids=str)
def test_unreachable_prefill_instance(model: Path, gate: Gate, change: dict[str, Any]) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        params = {**await prefill(both.prefill, PROMPT), **change}
        assert (await ask(both.decode, PROMPT, GREEDY, params)).tokens == expected
        assert both.decode.stat("load_failures") == 1
        assert (await ask_pair(both, prompt_of(60))).finish is FinishReason.LENGTH

    run(model, scenario, lease_s=1.0)
