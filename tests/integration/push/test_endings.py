"""Failures during a push: the answer has the right tokens or is an error, and all blocks are
freed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
from support.byte_tokenizer import write_byte_tokenizer
from support.checkpoints import random_model, write_checkpoint
from support.metaserver import metaserver
from support.pd import (
    GREEDY,
    VOCAB_SIZE,
    Answer,
    Pair,
    ask,
    instance,
    prompt_of,
    wait_until,
)
from support.pd_transport import Gate
from support.push import LAYERWISE, PushPair, ask_pushed, push_pair

from mooncake_engine.config import Role
from mooncake_engine.errors import EngineDead, InvalidRequest
from mooncake_engine.messages import FinishReason
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import KVTransferDict

PROMPT = prompt_of(150)
LONG = prompt_of(450)
CHUNK = 64
FAIL = {"load_failure": LoadFailurePolicy.FAIL}
GATED = {"transports": ("gated",), "max_num_batched_tokens": CHUNK}

Scenario = Callable[[list[int], PushPair], Coroutine[Any, Any, None]]


def run(model: Path, scenario: Scenario, prompt: tuple[int, ...] = PROMPT, **options: Any) -> None:
    """Run a scenario on a pair, given a single instance's answer; afterwards all blocks are
    free."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, prompt)).tokens
        async with push_pair(model, **options) as both:
            await scenario(expected, both)
            await both.check_clean()

    asyncio.run(main())


def params_of(metaserver: str) -> KVTransferDict:
    return {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": metaserver}


async def expect_failure(both: PushPair, reason: str, pending: Coroutine[Any, Any, Answer]) -> None:
    answer = await pending
    assert answer.finish is FinishReason.ERROR
    assert answer.error is not None
    assert reason in answer.error
    assert answer.tokens == []
    assert both.decode.stat("load_failures") == 1


@pytest.mark.parametrize("status", [404, 500, 302])
def test_metaserver_rejection_ends_the_wait(model: Path, status: int) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, status=status)


def test_metaserver_rejection_without_local_prefill_fails_request(model: Path) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        await expect_failure(both, "answered 500, not 202", ask_pushed(both, PROMPT))

    run(model, scenario, status=500, decode=FAIL)


def test_silent_metaserver_times_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_kv.metaserver_client.POST_TIMEOUT_S", 0.2)

    async def scenario(expected: list[int], both: PushPair) -> None:
        await expect_failure(both, "did not answer within 0.2 s", ask_pushed(both, PROMPT))

    run(model, scenario, is_silent=True, decode=FAIL)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:{port}/x", "failed"),
        ("http://host.invalid:80/x", "failed"),
        ("ftp://127.0.0.1/x", "wanted http://host:port/path"),
        ("http://127.0.0.1:99999/x", "failed"),
    ],
)
def test_unreachable_metaserver(model: Path, url: str, reason: str) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            params = params_of(url.format(port=free.getsockname()[1]))
            await expect_failure(both, reason, ask(both.decode, PROMPT, GREEDY, params))

    run(model, scenario, decode=FAIL)


def test_prefill_that_never_starts_times_out(model: Path) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        both.metaserver.dispatch = drop
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, decode={"lease_s": 0.5})


async def drop(key: str, params: KVTransferDict) -> None:
    """Send nothing."""


@pytest.mark.parametrize("num_failures", [1, 3])
def test_failed_write_is_recomputed(model: Path, gate: Gate, num_failures: int) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.num_failures = num_failures
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == both.prefill.stat("push_failures") == 1
        gate.num_failures = 0
        assert (await ask_pushed(both, prompt_of(90))).finish is FinishReason.LENGTH
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, **GATED)


def test_failed_write_reports_its_reason(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.num_failures = 1
        await expect_failure(both, "gated: told to fail", ask_pushed(both, PROMPT))

    run(model, scenario, decode=FAIL, **GATED)


def test_hung_write_times_out(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.close()
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, transfer_timeout_s=0.5, **GATED)


def test_aborted_request_keeps_blocks_until_writes_end(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.close()
        pending = asyncio.create_task(ask_pushed(both, PROMPT))
        await wait_until(lambda: gate.num_held > 0, 10)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await asyncio.sleep(1.0)  # keepalives continue: the peer knows of the abort by now
        assert both.decode.engine.stats().kv_cache_usage > 0
        both.decode.core.check_integrity()
        gate.open()
        await both.check_clean()
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("loads") == 2
        assert both.decode.stat("load_failures") == 0, "nobody lacks the KV of the aborted one"

    run(model, scenario, **GATED)


def test_aborted_prefill_notifies_decode_instance(model: Path, gate: Gate) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.close()

        async def go_away(key: str, params: KVTransferDict) -> None:
            """A proxy that requests the prefill and disconnects before it completes."""
            pending = asyncio.create_task(ask(both.prefill, LONG, GREEDY, params))
            await wait_until(lambda: gate.num_held > 0, 10)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            gate.open()

        both.metaserver.dispatch = go_away
        assert (await ask_pushed(both, LONG)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, prompt=LONG, prefill={"max_num_batched_tokens": 1}, **GATED)


def test_late_bytes_of_stalled_write_reach_no_reused_block(model: Path, gate: Gate) -> None:
    """P stalls in the middle of a layer, over a transport that cannot be stopped, and times out;
    the client has disconnected; the remaining bytes arrive while D decodes another prompt."""
    other = prompt_of(150, seed=1)
    longer = replace(GREEDY, max_tokens=40)
    gate.stops_writes_on_failure = False

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, other, longer)).tokens
        long_timeout, short_timeout = {"transfer_timeout_s": 600.0}, {"transfer_timeout_s": 0.5}
        async with push_pair(model, prefill=short_timeout, decode=long_timeout, **GATED) as both:
            gate.close()
            pending = asyncio.create_task(ask_pushed(both, PROMPT))
            await wait_until(lambda: gate.num_held > 0, 10)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            await both.prefill.check_clean()
            assert both.decode.stat("reservations") == 1
            assert both.decode.engine.stats().kv_cache_usage > 0
            gate.open()
            found = await ask_pushed(both, other, longer, lambda update: gate.land())
            assert gate.num_landed > 0
            assert found.tokens == expected
            assert both.decode.stat("reservations") == 1
            both.decode.core.check_integrity()

    asyncio.run(main())


def test_prefill_shutdown_leaves_nothing_behind(model: Path, gate: Gate) -> None:
    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with push_pair(model, **GATED) as both:
            gate.close()
            pending = asyncio.create_task(ask_pushed(both, PROMPT))
            await wait_until(lambda: gate.num_held > 0, 10)
            both.metaserver.is_failure_expected = True
            closing = asyncio.create_task(asyncio.to_thread(both.prefill.engine.close))
            await asyncio.sleep(0.2)
            gate.open()
            assert (await pending).tokens == expected
            assert both.decode.stat("load_failures") == 1
            await closing
            await both.decode.check_clean()

    asyncio.run(main())


def end_side_channel(connector: Any) -> None:
    """Close its sockets, as at the exit of the process; its event loop has already stopped."""
    listener = connector._server._listener
    clients = [entry.peer.client for entry in connector._peers._entries.values()]
    asked = [client._opening.result() for client in clients if client._opening is not None]
    listener._server.close()
    for session in (*listener.sessions, *asked):
        if session._transport._sock is not None:
            session._transport._sock.close()
            # otherwise its garbage collection raises a ResourceWarning
            session._transport._sock = None


@pytest.mark.filterwarnings(  # the thread that hung has nothing to report to
    "ignore:Exception in thread kv-push:pytest.PytestUnhandledThreadExceptionWarning"
)
def test_prefill_with_unstoppable_write_is_not_considered_dead(
    model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P's shutdown has completed, but not its write: the port stays taken, so D doesn't free the
    blocks."""
    monkeypatch.setattr("mooncake_kv.push_worker.JOIN_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with push_pair(model, lease_s=0.5, transfer_timeout_s=0.5, **GATED) as both:
            topology = both.prefill.core.report().topology
            assert topology is not None
            gate.ignores_cancellation = True
            gate.close()
            pending = asyncio.create_task(ask_pushed(both, PROMPT))
            await wait_until(lambda: gate.num_held > 0, 10)
            both.metaserver.is_failure_expected = True
            await asyncio.to_thread(both.prefill.engine.close)
            socket.create_connection((topology.host, topology.port), 5).close()
            assert (await pending).finish is FinishReason.LENGTH, "prefilled locally by D"
            assert both.decode.stat("reservations") == 1
            gate.open()
            await wait_until(lambda: "kv-push-0" not in {t.name for t in enumerate_threads()}, 10)
            end_side_channel(both.prefill.core._connector._connector)
            await both.decode.check_clean()

    asyncio.run(main())


def test_lost_decode_instance_frees_prefill_blocks(model: Path, gate: Gate) -> None:
    async def main() -> None:
        async with push_pair(model, lease_s=1.0, **GATED) as both:
            gate.close()
            pending = asyncio.create_task(ask_pushed(both, PROMPT))
            await wait_until(lambda: gate.num_held > 0, 10)
            closing = asyncio.create_task(asyncio.to_thread(both.decode.engine.close))
            with pytest.raises(EngineDead):
                await pending
            gate.open()
            await closing
            await both.prefill.check_clean(20)
            assert (await ask(both.prefill, PROMPT)).finish is FinishReason.LENGTH

    asyncio.run(main())


def test_other_model_is_rejected_with_both_fingerprints(model: Path, tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
    other = write_byte_tokenizer(
        write_checkpoint(random_model("llama", seed=9, **fields), tmp_path / "other")
    )

    async def main() -> None:
        async with (
            instance(other, Role.PREFILL, connector=LAYERWISE) as prefill,
            instance(model, Role.DECODE, connector=LAYERWISE, **FAIL) as decode,
        ):
            both = PushPair(Pair(prefill, decode))
            async with metaserver(both.dispatch) as both.metaserver:
                await expect_failure(both, "model differs", ask_pushed(both, PROMPT))
            await both.check_clean()

    asyncio.run(main())


def test_params_of_other_connector_are_rejected(model: Path) -> None:
    async def main() -> None:
        async with push_pair(model) as both:
            with pytest.raises(InvalidRequest, match=r"request a pull, .* does a push"):
                await ask(both.prefill, PROMPT, GREEDY, {"do_remote_decode": True})
        async with instance(model, Role.DECODE) as puller:
            with pytest.raises(InvalidRequest, match=r"request a push, .* does a pull"):
                await ask(puller, PROMPT, GREEDY, params_of("http://127.0.0.1:1/x"))

    asyncio.run(main())


def test_other_prompt_of_same_length_is_rejected(model: Path) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        dispatch = both.dispatch

        async def mix_up(key: str, params: KVTransferDict) -> None:
            both.waiting[key] = replace(both.waiting[key], prompt=prompt_of(len(PROMPT), seed=1))
            with pytest.raises(InvalidRequest, match="given another prompt of 150 tokens"):
                await dispatch(key, params)

        both.metaserver.dispatch = mix_up
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario, decode={"lease_s": 0.5})


@pytest.mark.parametrize("leases_s", [(60.0, 1.0), (1.0, 60.0)], ids=["reader", "writer"])
def test_push_outlives_shorter_lease(
    model: Path, gate: Gate, leases_s: tuple[float, float]
) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        gate.close()
        pending = asyncio.create_task(ask_pushed(both, PROMPT))
        await wait_until(lambda: gate.num_held > 0, 10)
        await asyncio.sleep(3.0)
        gate.open()
        assert (await pending).tokens == expected
        assert both.decode.stat("load_failures") == 0

    first, second = ({"lease_s": lease_s} for lease_s in leases_s)
    run(model, scenario, prefill=first, decode=second, **GATED)


def test_params_contradicting_decode_instance_are_rejected(model: Path) -> None:
    async def scenario(expected: list[int], both: PushPair) -> None:
        dispatch = both.dispatch

        async def lie(key: str, params: KVTransferDict) -> None:
            await dispatch(key, {**params, "remote_tp_size": 4})

        both.metaserver.dispatch = lie
        words = "a tensor-parallel size of 4, it has 1"
        await expect_failure(both, words, ask_pushed(both, PROMPT))

    run(model, scenario, decode=FAIL)
