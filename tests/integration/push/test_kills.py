"""One side of a push is killed or frozen while the other one waits for it or writes to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.metaserver import Metaserver, metaserver
from support.pd import GREEDY, Instance, ask, instance, prompt_of, wait_until
from support.pd_processes import Served, body_of, serving
from support.pd_transport import NAME, Gate
from support.push import LAYERWISE

from mooncake_engine.config import Role
from mooncake_hal.testing.backends import free_port
from mooncake_kv.params import KVTransferDict

LEASE_S = 1.5
TIMEOUT_S = 30.0
OPTIONS = ("--kv-connector", LAYERWISE, "--transport", NAME, "--lease-seconds", str(LEASE_S))
IN_PROCESS = {"connector": LAYERWISE, "transports": (NAME,), "lease_s": LEASE_S}
PROMPT = prompt_of(200)
TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def plugins_for_children(plugin_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{plugin_path}:{TESTS}", prepend=":")


def params_of(metaserver_url: str) -> KVTransferDict:
    return {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": metaserver_url}


@contextlib.asynccontextmanager
async def sent_to(prefill: Served) -> AsyncIterator[Metaserver]:
    """A metaserver that sends every prefill of PROMPT to this instance and tolerates its death."""

    async def dispatch(key: str, params: KVTransferDict) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await prefill.complete(body_of(PROMPT, replace(GREEDY, max_tokens=1), params))

    async with metaserver(dispatch) as server:
        yield server


async def begin(decode: Instance, server: Metaserver) -> asyncio.Task[list[int]]:
    """Start a request; returns once D has admitted a prefill instance for it."""

    async def tokens() -> list[int]:
        return (await ask(decode, PROMPT, GREEDY, params_of(server.url("k")))).tokens

    pending = asyncio.create_task(tokens())
    await wait_until(lambda: bool(server.posts), 5.0)
    await asyncio.sleep(LEASE_S)  # longer than D waits for a prefill instance to connect
    assert decode.stat("reservations") == 1
    assert not pending.done()
    return pending


def test_killed_prefill_instance(model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """P hangs in a write; D receives nothing more from it, considers it dead, and frees the
    blocks."""
    monkeypatch.setenv("MOONCAKE_TEST_GATE", "closed")

    async def main() -> None:
        async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
            with serving(model, "prefill", *OPTIONS) as victim:
                async with sent_to(victim) as server:
                    pending = await begin(decode, server)
                    victim.kill()
                    found = await asyncio.wait_for(pending, TIMEOUT_S)
            await decode.check_clean(TIMEOUT_S)
            assert decode.stat("reservations") == 0
        async with instance(model) as single:
            assert found == (await ask(single, PROMPT)).tokens

    asyncio.run(main())


def test_restarted_prefill_instance_is_another_epoch(
    model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance at P's address is not the one that D admitted; its next push is its own."""
    port = ("--kv-port", str(free_port()))

    async def main() -> None:
        async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
            monkeypatch.setenv("MOONCAKE_TEST_GATE", "closed")
            with serving(model, "prefill", *OPTIONS, *port) as victim:
                async with sent_to(victim) as server:
                    pending = await begin(decode, server)
                    victim.kill()
            monkeypatch.delenv("MOONCAKE_TEST_GATE")
            with serving(model, "prefill", *OPTIONS, *port) as successor:
                found = await asyncio.wait_for(pending, TIMEOUT_S)
                await decode.check_clean(10.0)
                failures = decode.stat("load_failures")
                async with sent_to(successor) as server:
                    again = await ask(decode, PROMPT, GREEDY, params_of(server.url("k")))
                assert decode.stat("load_failures") == failures == 1
        async with instance(model) as single:
            assert found == again.tokens == (await ask(single, PROMPT)).tokens

    asyncio.run(main())


def test_restarted_decode_instance_receives_no_writes_of_old_epoch(model: Path, gate: Gate) -> None:
    """Writes to the dead instance fail; the one at its address gets only writes of its own
    requests."""
    port = ("--kv-port", str(free_port()))

    async def main() -> None:
        async with instance(model, Role.PREFILL, **IN_PROCESS) as prefill:

            async def dispatch(key: str, params: KVTransferDict) -> None:
                await ask(prefill, PROMPT, replace(GREEDY, max_tokens=1), params)

            async with metaserver(dispatch) as server:
                body = body_of(PROMPT, GREEDY, params_of(server.url("k")))
                gate.close()
                with serving(model, "decode", *OPTIONS, *port) as victim:
                    pending = asyncio.create_task(victim.complete(body))
                    await wait_until(lambda: gate.num_held > 0, 10.0)
                    victim.kill()
                    await asyncio.gather(pending, return_exceptions=True)
                with serving(model, "decode", *OPTIONS, *port) as successor:
                    gate.open()
                    await prefill.check_clean(10 * LEASE_S)
                    assert prefill.stat("push_failures") == 1
                    found = await successor.complete(body)
                    assert await successor.figure("mooncake:kv_transfer_load_failures_total") == 0
                    await successor.wait_until_idle(5.0)
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
            assert found["choices"][0]["token_ids"] == expected

    asyncio.run(main())


def test_frozen_prefill_instance_may_still_write(
    model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request continues in other blocks; the old blocks are freed when P wakes up, not
    before."""
    monkeypatch.setenv("MOONCAKE_TEST_GATE", "closed")

    async def main() -> None:
        async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
            with serving(model, "prefill", *OPTIONS, "--transfer-timeout-seconds", "4") as frozen:
                async with sent_to(frozen) as server:
                    pending = await begin(decode, server)
                    frozen.program.process.send_signal(signal.SIGSTOP)
                    found = await asyncio.wait_for(pending, TIMEOUT_S)
                    assert decode.stat("reservations") == 1
                    assert decode.engine.stats().kv_cache_usage > 0
                    decode.core.check_integrity()
                    frozen.program.process.send_signal(signal.SIGCONT)
                    await decode.check_clean(10.0)
                    assert decode.stat("reservations") == 0
        async with instance(model) as single:
            assert found == (await ask(single, PROMPT)).tokens

    asyncio.run(main())


def test_killed_decode_instance(model: Path, gate: Gate) -> None:
    """P was writing to D: it stops, frees its blocks, and serves the next one."""

    async def main() -> None:
        async with instance(model, Role.PREFILL, **IN_PROCESS) as prefill:

            async def dispatch(key: str, params: KVTransferDict) -> None:
                await ask(prefill, PROMPT, replace(GREEDY, max_tokens=1), params)

            async with metaserver(dispatch) as server:
                gate.close()
                with serving(model, "decode", *OPTIONS) as victim:
                    body = body_of(PROMPT, GREEDY, params_of(server.url("k")))
                    pending = asyncio.create_task(victim.complete(body))
                    await wait_until(lambda: gate.num_held > 0, 10.0)
                    victim.kill()
                    [ended] = await asyncio.gather(pending, return_exceptions=True)
                    assert isinstance(ended, httpx.HTTPError)
                gate.open()
                await prefill.check_clean(10 * LEASE_S)
                assert prefill.stat("push_failures") == 1
                async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
                    found = await ask(decode, PROMPT, GREEDY, params_of(server.url("k")))
                    assert decode.stat("load_failures") == 0
        async with instance(model) as single:
            assert found.tokens == (await ask(single, PROMPT)).tokens

    asyncio.run(main())
