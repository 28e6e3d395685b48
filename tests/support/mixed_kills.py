"""Kills one side of a mixed pair in each state that a request may be in on that side."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from support.metaserver import metaserver
from support.mixed_fleet import (
    FIRST,
    START_S,
    Side,
    ask_across,
    check_idle,
    freeze,
    start_one,
    thaw,
    tokens_of,
)
from support.npu import FEW, Case
from support.pd_processes import Served, body_of

from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import KVTransferDict

SURVIVOR_S = 60.0
"""Timeout within which leases, keepalives and deadlines release what a dead peer held."""
IN_FLIGHT_S = 1.0
"""Time for a request to reach the frozen side."""
KILL_TIMEOUT_S = 300.0
_LOADS = "mooncake:kv_transfer_loads_total"
OPTIONS = ("--transfer-timeout-seconds", "20")
CONTEXT = 4096
"""Context length of the model: an answer outlasts the polling even on a busy machine."""
ENDLESS = replace(FEW, max_tokens=3000)


@dataclass(frozen=True)
class Pair:
    """Both instances, and a prompt that they have not seen with this salt."""

    prefill: Served
    decode: Served
    case: Case
    salt: str

    async def prefilled(self) -> KVTransferDict:
        """Have P compute the prompt for D."""
        return await self.prefill.prefill(self.case.prompt, self.salt)

    def body(
        self, params: KVTransferDict | None = None, sampling: SamplingParams = FEW
    ) -> dict[str, Any]:
        """The body of a request for the prompt."""
        return body_of(self.case.prompt, sampling, params, self.salt)


async def _holder(of: Pair) -> Served:
    """P holds a prompt's KV for D when it dies; D finds P gone and computes the prompt itself."""
    params = await of.prefilled()
    of.prefill.kill()
    answer = await of.decode.complete(of.body(params))
    assert tokens_of(answer) == of.case.tokens
    return of.decode


async def _read_holder(of: Pair) -> Served:
    """P dies while D reads from it."""
    params = await of.prefilled()
    freeze(of.prefill)
    reading = asyncio.create_task(of.decode.complete(of.body(params)))
    await asyncio.sleep(IN_FLIGHT_S)
    assert not reading.done()
    of.prefill.kill()
    assert tokens_of(await reading) == of.case.tokens
    return of.decode


async def _reader(of: Pair) -> Served:
    """D dies while it reads; P gets its blocks back when the lease expires."""
    params = await of.prefilled()
    freeze(of.prefill)
    reading = asyncio.create_task(of.decode.complete(of.body(params)))
    await asyncio.sleep(IN_FLIGHT_S)
    of.decode.kill()
    await _ends_with_its_instance(reading)
    thaw(of.prefill)
    return of.prefill


@asynccontextmanager
async def _loaded(decode: Served) -> AsyncIterator[None]:
    """Leave the block once D has loaded the KV for the block's request and is decoding."""
    before = await decode.figure(_LOADS)
    yield
    deadline = time.monotonic() + SURVIVOR_S
    while await decode.figure(_LOADS) == before:
        assert time.monotonic() < deadline, f"D has loaded nothing after {SURVIVOR_S:g} s"
        await asyncio.sleep(0.01)


async def _decoder(of: Pair) -> Served:
    """D dies while it decodes; P holds nothing for the request any more."""
    params = await of.prefilled()
    async with _loaded(of.decode):
        decoding = asyncio.create_task(of.decode.complete(of.body(params, ENDLESS)))
    of.decode.kill()
    await _ends_with_its_instance(decoding)
    return of.prefill


@asynccontextmanager
async def _pushing(of: Pair) -> AsyncIterator[asyncio.Task[list[int]]]:
    """A request at D whose prefill P is about to push; D is frozen from then on."""
    dispatched = asyncio.Event()

    async def dispatch(key: str, params: KVTransferDict) -> None:
        freeze(of.decode)
        dispatched.set()
        with contextlib.suppress(httpx.HTTPError):
            await of.prefill.complete(of.body(params, FIRST))

    async with metaserver(dispatch) as server:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "metaserver": server.url("k"),
        }
        asking = asyncio.create_task(of.decode.complete(of.body(params)))
        await dispatched.wait()
        await asyncio.sleep(IN_FLIGHT_S)
        yield asyncio.ensure_future(_tokens(asking))


async def _tokens(asking: Awaitable[dict[str, object]]) -> list[int]:
    return tokens_of(await asking)


async def _writer(of: Pair) -> Served:
    """P dies while it writes; D detects that and computes the prompt itself."""
    async with _pushing(of) as asking:
        of.prefill.kill()
        thaw(of.decode)
        assert await asking == of.case.tokens
    return of.decode


async def _written_to(of: Pair) -> Served:
    """D dies while P writes to it; P stops."""
    async with _pushing(of) as asking:
        of.decode.kill()
        await _ends_with_its_instance(asking)
    return of.prefill


async def _pushed_decoder(of: Pair) -> Served:
    """D dies while it decodes a pushed prompt."""
    async with _loaded(of.decode):
        asking = asyncio.create_task(
            ask_across(of.prefill, of.decode, "push", of.case.prompt, ENDLESS, of.salt)
        )
    of.decode.kill()
    await _ends_with_its_instance(asking)
    return of.prefill


async def _ends_with_its_instance(asking: Awaitable[object]) -> None:
    [ended] = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(ended, httpx.HTTPError), ended


KILLS: dict[tuple[str, str], Callable[[Pair], Awaitable[Served]]] = {
    ("pull", "P, holding"): _holder,
    ("pull", "P, being read"): _read_holder,
    ("pull", "D, reading"): _reader,
    ("pull", "D, decoding"): _decoder,
    ("push", "P, writing"): _writer,
    ("push", "D, written to"): _written_to,
    ("push", "D, decoding"): _pushed_decoder,
}
"""By transfer direction, and the state in which a side is killed; each returns the survivor."""


async def check_kills(
    model: Path, how: str, sides: tuple[Side, Side], cases: Sequence[Case]
) -> AsyncIterator[tuple[str, str | None]]:
    """Every kill of a pair in turn; each time the survivor has to serve with a new partner.

    Yields:
        Each state's name, and its error or None.
    """
    with ExitStack() as stack:

        async def start(role: str) -> Served:
            side = sides[role == "decode"]
            program = start_one(model, how, role, side, *OPTIONS)
            stack.callback(program.close)
            line = await asyncio.to_thread(program.wait_for, "ready ", START_S)
            return Served(line.split()[1], program)

        pair: tuple[Served, Served] | None = None
        for name in (name for each, name in KILLS if each == how):
            try:
                if pair is None:
                    prefill, decode = await asyncio.gather(start("prefill"), start("decode"))
                    pair = prefill, decode
                wanted = _check_kill(how, name, pair, cases, start)
                pair = await asyncio.wait_for(wanted, KILL_TIMEOUT_S)
            except (AssertionError, asyncio.TimeoutError, httpx.HTTPError, OSError) as exc:
                for served in pair or ():
                    served.program.close()
                pair = None
                yield name, f"{type(exc).__name__}: {str(exc)[:300]}"
            else:
                yield name, None


async def _check_kill(
    how: str,
    name: str,
    pair: tuple[Served, Served],
    cases: Sequence[Case],
    start: Callable[[str], Awaitable[Served]],
) -> tuple[Served, Served]:
    """Check a kill: requests get the CPU's tokens or fail with their instance; the survivor
    releases everything and serves with a new partner.

    Returns:
        The new pair.

    Raises:
        AssertionError: a check failed.
    """
    first, second, *_ = cases
    prefill, decode = pair
    left = await KILLS[how, name](Pair(prefill, decode, second, f"killed: {name}"))
    await check_idle(left, SURVIVOR_S)
    fresh = await start("decode" if left is prefill else "prefill")
    pair = (left, fresh) if left is prefill else (fresh, left)
    found = await ask_across(*pair, how, first.prompt, salt=f"after: {name}")
    assert found == first.tokens, f"wrong tokens {found} afterwards, wanted {first.tokens}"
    for served in pair:
        await check_idle(served, SURVIVOR_S)
    return pair
