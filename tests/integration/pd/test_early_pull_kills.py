"""One side of an early pull is killed or frozen while P computes and D reads; both are real
processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.metaserver import Metaserver, metaserver
from support.pd import GREEDY, Instance, ask, instance, prompt_of, wait_until
from support.pd_processes import Served, body_of, serving

from mooncake_engine.config import Role
from mooncake_hal.testing.backends import free_port
from mooncake_kv import side_channel
from mooncake_kv.params import KVTransferDict

LEASE_S = 1.5
TIMEOUT_S = 60.0
OPTIONS = ("--transport", "shm", "--lease-seconds", str(LEASE_S))
SLOW = ("--max-num-batched-tokens", "1")
"""One step per token, so that P computes long enough to be killed meanwhile."""
IN_PROCESS = {"transports": ("shm",), "lease_s": LEASE_S}
PROMPT = prompt_of(450)
ONE = replace(GREEDY, max_tokens=1)


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "TRY_TIMEOUT_S", 0.3)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """The answer of a single instance."""

    async def main() -> list[int]:
        async with instance(model) as single:
            return (await ask(single, PROMPT)).tokens

    return asyncio.run(main())


def params_of(server: Metaserver) -> KVTransferDict:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "do_pull": True,
        "metaserver": server.url("k"),
    }


@contextlib.asynccontextmanager
async def sent_to(prefill: Served) -> AsyncIterator[Metaserver]:
    """A metaserver that sends every prefill of PROMPT to this instance and tolerates its death."""

    async def dispatch(key: str, params: KVTransferDict) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await prefill.complete(body_of(PROMPT, ONE, params))

    async with metaserver(dispatch) as server:
        yield server


async def begin(decode: Instance, server: Metaserver) -> asyncio.Task[list[int]]:
    """Start a request; returns once D has read a part of its prompt, while P computes the rest."""

    async def tokens() -> list[int]:
        return (await ask(decode, PROMPT, GREEDY, params_of(server))).tokens

    before = decode.stat("bytes_received")
    pending = asyncio.create_task(tokens())
    await wait_until(lambda: decode.stat("bytes_received") > before, TIMEOUT_S, decode.describe)
    assert not pending.done()
    return pending


def test_killed_prefill_instance(model: Path, expected: list[int]) -> None:
    """D computes the prompt; P restarts at the same port with a new epoch, and D reads from it
    again."""
    port = ("--kv-port", str(free_port()))

    async def main() -> None:
        async with instance(model, Role.DECODE, prefix_caching=False, **IN_PROCESS) as decode:
            with serving(model, "prefill", *OPTIONS, *SLOW, *port) as victim:
                async with sent_to(victim) as server:
                    pending = await begin(decode, server)
                    victim.kill()
                    assert await asyncio.wait_for(pending, TIMEOUT_S) == expected
            assert decode.stat("load_failures") == 1
            await decode.check_clean(TIMEOUT_S)
            with serving(model, "prefill", *OPTIONS, *port) as successor:
                async with sent_to(successor) as server:
                    again = await ask(decode, PROMPT, GREEDY, params_of(server))
                assert again.tokens == expected
                assert decode.stat("load_failures") == 1
                await successor.wait_until_idle(TIMEOUT_S)
            await decode.check_clean()

    asyncio.run(main())


def test_frozen_prefill_instance(model: Path, expected: list[int]) -> None:
    """D abandons P after one lease time; when P continues, it holds nothing for D."""

    async def main() -> None:
        async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
            with serving(model, "prefill", *OPTIONS, *SLOW) as frozen:
                async with sent_to(frozen) as server:
                    pending = await begin(decode, server)
                    frozen.program.process.send_signal(signal.SIGSTOP)
                    assert await asyncio.wait_for(pending, TIMEOUT_S) == expected
                    assert decode.stat("load_failures") == 1
                    await decode.check_clean(TIMEOUT_S)
                    frozen.program.process.send_signal(signal.SIGCONT)
                    await frozen.wait_until_idle(TIMEOUT_S)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def computed_by(prefill: Instance) -> AsyncIterator[Metaserver]:
    """A metaserver that has an instance of this process compute every prefill of PROMPT."""

    async def dispatch(key: str, params: KVTransferDict) -> None:
        await ask(prefill, PROMPT, ONE, params)

    async with metaserver(dispatch) as server:
        yield server


def begin_far(victim: Served, server: Metaserver) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(victim.complete(body_of(PROMPT, GREEDY, params_of(server))))


async def is_read_from(prefill: Instance, victim: Served) -> None:
    """Wait until the instance has read a part, while P still computes."""
    received = "mooncake:kv_transfer_bytes_received_total"
    deadline = time.monotonic() + TIMEOUT_S
    while not await victim.figure(received):
        assert time.monotonic() < deadline, "D reads nothing"
        await asyncio.sleep(0.01)
    assert prefill.engine.stats().num_running == 1


def test_killed_decode_instance(model: Path, expected: list[int]) -> None:
    """P frees its blocks and serves the next decode instance."""

    async def main() -> None:
        slow = {"max_num_batched_tokens": 1}
        async with instance(model, Role.PREFILL, **slow, **IN_PROCESS) as prefill:
            async with computed_by(prefill) as server:
                with serving(model, "decode", *OPTIONS) as victim:
                    pending = begin_far(victim, server)
                    await is_read_from(prefill, victim)
                    victim.kill()
                    [ended] = await asyncio.gather(pending, return_exceptions=True)
                    assert isinstance(ended, httpx.HTTPError)
                await prefill.check_clean(TIMEOUT_S)
                async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
                    found = await ask(decode, PROMPT, GREEDY, params_of(server))
                    assert found.tokens == expected
                    assert decode.stat("load_failures") == 0
            await prefill.check_clean(TIMEOUT_S)

    asyncio.run(main())


def test_frozen_decode_instance(model: Path, expected: list[int]) -> None:
    """P frees its blocks; when D continues, it computes the prompt itself, with the right
    tokens."""

    async def main() -> None:
        slow = {"max_num_batched_tokens": 1}
        async with (
            instance(model, Role.PREFILL, **slow, **IN_PROCESS) as prefill,
            computed_by(prefill) as server,
        ):
            with serving(model, "decode", *OPTIONS) as frozen:
                pending = begin_far(frozen, server)
                await is_read_from(prefill, frozen)
                frozen.program.process.send_signal(signal.SIGSTOP)
                await prefill.check_clean(TIMEOUT_S)
                frozen.program.process.send_signal(signal.SIGCONT)
                answer = await asyncio.wait_for(pending, TIMEOUT_S)
                assert answer["choices"][0]["token_ids"] == expected
                await frozen.wait_until_idle(TIMEOUT_S)

    asyncio.run(main())
