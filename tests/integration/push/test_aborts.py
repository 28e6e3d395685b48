"""Pushes aborted in every state, by the client or by the proxy.

Blocks are freed at once, or as soon as nothing writes to them any more, and other requests are not
affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.pd import GREEDY, Answer, ask, instance, prompt_of, wait_until
from support.pd_transport import NAME, Gate
from support.push import PushPair, ask_pushed, push_pair

from mooncake_engine.messages import FinishReason
from mooncake_kv.params import KVTransferDict

PROMPT = prompt_of(150)
GATED: dict[str, Any] = {"transports": (NAME,), "lease_s": 20.0}
SOON_S = 8.0
"""Shorter than any lease: blocks that are free by then were released and did not expire."""

Scenario = Callable[[PushPair], Coroutine[Any, Any, None]]


def run(model: Path, scenario: Scenario, **options: Any) -> None:
    """Run a scenario on a pair; all blocks are freed soon, and both instances still serve."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with push_pair(model, **{**GATED, **options}) as both:
            dispatch = both.metaserver.dispatch
            await scenario(both)
            await both.check_clean(SOON_S)
            both.metaserver.dispatch = dispatch
            failures = both.decode.stat("load_failures")
            assert (await ask_pushed(both, PROMPT)).tokens == expected
            assert both.decode.stat("load_failures") == failures
            await both.check_clean(SOON_S)

    asyncio.run(main())


async def leave(pending: asyncio.Task[Answer]) -> None:
    """Disconnect, as a client does."""
    pending.cancel()
    with suppress(asyncio.CancelledError):
        await pending


def test_abort_while_waiting_for_blocks(model: Path, gate: Gate) -> None:
    """Nothing was reserved, so no prefill is requested."""

    async def scenario(both: PushPair) -> None:
        gate.close()
        first = asyncio.create_task(ask_pushed(both, prompt_of(400)))
        await wait_until(lambda: gate.num_held > 0, SOON_S)
        second = asyncio.create_task(ask_pushed(both, prompt_of(300)))
        await wait_until(lambda: both.decode.engine.stats().num_waiting == 2, SOON_S)
        await leave(second)
        assert len(both.metaserver.posts) == 1
        gate.open()
        assert (await first).finish is FinishReason.LENGTH
        assert both.decode.stat("load_failures") == 0

    run(model, scenario, decode={"num_kv_blocks": 34})


def test_abort_before_prefill_instance_connects(model: Path, gate: Gate) -> None:
    """The blocks are free at once; the prefill instance connects too late and is rejected."""

    async def scenario(both: PushPair) -> None:
        dispatch = both.dispatch
        has_left = asyncio.Event()
        is_over = asyncio.Event()

        async def come_late(key: str, params: KVTransferDict) -> None:
            await has_left.wait()
            await dispatch(key, params)
            is_over.set()

        both.metaserver.dispatch = come_late
        pending = asyncio.create_task(ask_pushed(both, PROMPT))
        await wait_until(lambda: bool(both.metaserver.posts), SOON_S)
        await leave(pending)
        await both.check_clean(SOON_S)
        has_left.set()
        await is_over.wait()
        await wait_until(lambda: both.prefill.stat("push_failures") == 1, SOON_S)

    run(model, scenario)


def test_abort_while_decoding(model: Path, gate: Gate) -> None:
    async def scenario(both: PushPair) -> None:
        seen: list[int] = []
        endless = replace(GREEDY, max_tokens=300)
        pending = asyncio.create_task(
            ask_pushed(both, PROMPT, endless, lambda update: seen.extend(update.token_ids))
        )
        await wait_until(lambda: len(seen) > 3, SOON_S)
        await leave(pending)

    run(model, scenario)


def test_abort_of_queued_prefill(model: Path, gate: Gate) -> None:
    """The proxy disconnects from the prefill instance before it has computed anything."""

    async def scenario(both: PushPair) -> None:
        busy = asyncio.create_task(ask(both.prefill, PROMPT, replace(GREEDY, max_tokens=300)))
        await wait_until(lambda: both.prefill.engine.stats().num_running == 1, SOON_S)

        async def go_away(key: str, params: KVTransferDict) -> None:
            waiting = asyncio.create_task(ask(both.prefill, PROMPT, GREEDY, params))
            await wait_until(lambda: both.prefill.engine.stats().num_waiting == 1, SOON_S)
            await leave(waiting)

        both.metaserver.dispatch = go_away
        assert (await ask_pushed(both, PROMPT)).finish is FinishReason.LENGTH
        assert both.decode.stat("load_failures") == 1
        assert both.prefill.stat("push_failures") == 0
        await leave(busy)

    run(model, scenario, prefill={"max_num_seqs": 1})


def test_abort_of_completed_prefill_during_writes(model: Path, gate: Gate) -> None:
    """The prefill instance has responded; its writes are aborted by request id, as over HTTP."""

    async def scenario(both: PushPair) -> None:
        gate.close()
        names: list[str] = []

        async def give_up(key: str, params: KVTransferDict) -> None:
            one = replace(GREEDY, max_tokens=1)
            await ask(both.prefill, PROMPT, one, params, lambda u: names.append(u.request_id))
            await wait_until(lambda: gate.num_held > 0, SOON_S)
            for _ in range(2):
                both.prefill.engine.abort(names[0])
            gate.open()

        both.metaserver.dispatch = give_up
        assert (await ask_pushed(both, PROMPT)).finish is FinishReason.LENGTH
        assert names

    run(model, scenario)


def test_abort_on_both_sides_at_once(model: Path, gate: Gate) -> None:
    """The client disconnects, and the proxy aborts on both instances at the same moment."""

    async def scenario(both: PushPair) -> None:
        gate.close()
        prefills: list[asyncio.Task[Answer]] = []

        async def begin(key: str, params: KVTransferDict) -> None:
            prefills.append(asyncio.create_task(ask(both.prefill, PROMPT, GREEDY, params)))

        both.metaserver.dispatch = begin
        pending = asyncio.create_task(ask_pushed(both, PROMPT))
        await wait_until(lambda: gate.num_held > 0, SOON_S)
        await asyncio.gather(leave(pending), leave(prefills[0]))
        both.decode.core.check_integrity()
        gate.open()

    run(model, scenario)
