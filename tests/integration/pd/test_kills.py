"""One side is killed while requests are in every possible state; the other one continues to
serve."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from support.pd import (
    GREEDY,
    Answer,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    prefill,
    prompt_of,
    wait_until,
)
from support.pd_processes import Served, body_of, serving
from support.pd_transport import NAME, Gate

from mooncake_engine.config import Role
from mooncake_engine.messages import FinishReason
from mooncake_kv import side_channel
from mooncake_kv.config import LoadFailurePolicy

LEASE_S = 1.5
OPTIONS = ("--transport", NAME, "--lease-seconds", str(LEASE_S))
PROMPTS = [prompt_of(200, seed=seed) for seed in range(5)]
TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("short_timeouts")


@pytest.fixture(autouse=True)
def plugins_for_children(plugin_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{plugin_path}:{TESTS}", prepend=":")


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "TRY_TIMEOUT_S", 0.3)


async def answers_of(model: Path, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """The answers of a single instance."""
    async with instance(model) as single:
        return [(await ask(single, prompt)).tokens for prompt in prompts]


def check(answer: Answer, expected: list[int], policy: LoadFailurePolicy) -> None:
    """Check for the right tokens or a proper error, never wrong tokens."""
    if policy is LoadFailurePolicy.RECOMPUTE or answer.finish is not FinishReason.ERROR:
        assert answer.tokens == expected
        assert answer.finish is FinishReason.LENGTH
        return
    assert answer.tokens == expected[:1]
    assert "the prompt's KV did not arrive" in str(answer.error)


@pytest.mark.parametrize(
    "policy",
    [LoadFailurePolicy.RECOMPUTE, LoadFailurePolicy.FAIL],
    ids=lambda policy: policy.value,
)
def test_killed_prefill_instance(model: Path, gate: Gate, policy: LoadFailurePolicy) -> None:
    """Two of P's prompts are being read, one waits for blocks, one was never requested, and one is
    being prefilled. P restarts at the same ports with a new epoch."""

    async def main() -> None:
        expected = await answers_of(model, PROMPTS)
        options = {"transports": (NAME,), "lease_s": LEASE_S, "load_failure": policy}
        async with instance(model, Role.DECODE, num_kv_blocks=34, **options) as decode:
            with serving(model, "prefill", *OPTIONS) as first:
                kv_port, answers = await kill_it(first, decode, gate)
            for answer, tokens in zip(answers, expected, strict=False):
                check(answer, tokens, policy)
            await decode.check_clean(LEASE_S + 5.0)
            await serve_on(model, kv_port, decode, expected[4])

    asyncio.run(main())


async def kill_it(first: Served, decode: Instance, gate: Gate) -> tuple[int, list[Answer]]:
    gate.close()
    params = [await first.prefill(prompt) for prompt in PROMPTS[:4]]
    running = [
        asyncio.create_task(ask(decode, prompt, GREEDY, wanted))
        for prompt, wanted in zip(PROMPTS[:3], params, strict=False)
    ]
    await wait_until(lambda: gate.num_held == 2, 5.0)
    assert decode.engine.stats().num_waiting == 3
    prefilling = [asyncio.create_task(first.prefill(prompt_of(490, seed=n))) for n in range(8)]
    await asyncio.sleep(0.02)
    first.kill()
    ended = await asyncio.gather(*prefilling, return_exceptions=True)
    assert all(isinstance(end, (httpx.HTTPError, dict)) for end in ended)
    gate.open()
    running.append(asyncio.create_task(ask(decode, PROMPTS[3], GREEDY, params[3])))
    return params[0]["remote_port"], list(await asyncio.gather(*running))


async def serve_on(model: Path, kv_port: int, decode: Instance, expected: list[int]) -> None:
    with serving(model, "prefill", *OPTIONS, "--kv-port", str(kv_port)) as second:
        failures = decode.stat("load_failures")
        params = await second.prefill(PROMPTS[4])
        assert (await ask(decode, PROMPTS[4], GREEDY, params)).tokens == expected
        assert decode.stat("load_failures") == failures
        await second.wait_until_idle(LEASE_S + 2.0)
    await decode.check_clean()


def test_frozen_prefill_instance(model: Path, gate: Gate) -> None:
    """P is silent but alive; when it continues, its leases have expired."""

    async def main() -> None:
        expected = await answers_of(model, PROMPTS[:3])
        options = {"transports": (NAME,), "lease_s": LEASE_S}
        async with instance(model, Role.DECODE, **options) as decode:
            with serving(model, "prefill", *OPTIONS) as first:
                params = [await first.prefill(prompt) for prompt in PROMPTS[:3]]
                first.program.process.send_signal(signal.SIGSTOP)
                pending = [
                    ask(decode, prompt, GREEDY, wanted)
                    for prompt, wanted in zip(PROMPTS[:2], params, strict=False)
                ]
                answers = await asyncio.wait_for(asyncio.gather(*pending), 20.0)
                assert [answer.tokens for answer in answers] == expected[:2]
                first.program.process.send_signal(signal.SIGCONT)
                await first.wait_until_idle(LEASE_S + 2.0)
                fresh = await first.prefill(PROMPTS[2])
                assert (await ask(decode, PROMPTS[2], GREEDY, fresh)).tokens == expected[2]
                assert decode.stat("load_failures") == 2
                await first.wait_until_idle(LEASE_S + 2.0)
            await decode.check_clean()

    asyncio.run(main())


def test_killed_decode_instance(model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """D was reading some prompts and had others queued; P frees all their blocks."""
    monkeypatch.setenv("MOONCAKE_TEST_GATE", "closed")

    async def main() -> None:
        [expected] = await answers_of(model, PROMPTS[:1])
        options = {"transports": (NAME,), "lease_s": LEASE_S}
        async with instance(model, Role.PREFILL, **options) as first:
            with serving(model, "decode", *OPTIONS, "--num-kv-blocks", "34") as victim:
                await kill_reader(first, victim)
            await first.check_clean(LEASE_S + 2.0)
            assert first.stat("leases_expired") == 4
            async with instance(model, Role.DECODE, **options) as second:
                both = Pair(first, second)
                assert (await ask_pair(both, PROMPTS[0])).tokens == expected
                assert second.stat("load_failures") == 0
                await both.check_clean()

    asyncio.run(main())


async def kill_reader(first: Instance, victim: Served) -> None:
    bodies = [body_of(prompt, GREEDY, await prefill(first, prompt)) for prompt in PROMPTS[:4]]
    running = [asyncio.create_task(victim.complete(body)) for body in bodies]
    await asyncio.sleep(2 * LEASE_S)
    assert first.stat("leases_held") == 4, "the reader did not keep the leases"
    victim.kill()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(end, httpx.HTTPError) for end in ended)


def test_decode_instance_killed_while_decoding(model: Path, gate: Gate) -> None:
    async def main() -> None:
        options = {"transports": (NAME,), "lease_s": LEASE_S}
        async with instance(model, Role.PREFILL, **options) as first:
            with serving(model, "decode", *OPTIONS) as victim:
                body = body_of(PROMPTS[0], GREEDY, await prefill(first, PROMPTS[0]))
                endless = asyncio.create_task(victim.complete({**body, "max_tokens": 300}))
                await first.check_clean(LEASE_S)
                assert first.stat("leases_expired") == 0
                victim.kill()
                with pytest.raises(httpx.HTTPError):
                    await endless
            assert (await ask(first, PROMPTS[1])).finish is FinishReason.LENGTH
            await first.check_clean()

    asyncio.run(main())
