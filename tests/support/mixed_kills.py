"""One side of a mixed pair is killed in each state that a request may be in there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from support.metaserver import metaserver
from support.mixed_fleet import (
    FIRST,
    Side,
    ask_across,
    check_idle,
    freeze,
    start_all,
    thaw,
    tokens_of,
)
from support.npu import FEW, Case
from support.pd_processes import Served, body_of

from mooncake_kv.params import KVTransferDict

SURVIVOR_S = 60.0
"""For leases, keepalives and deadlines to end what waits for the dead one."""
IN_FLIGHT_S = 1.0
"""For a request to come where it hangs."""
OPTIONS = ("--transfer-timeout-seconds", "20")
ENDLESS = replace(FEW, max_tokens=150)


@dataclass(frozen=True)
class Pair:
    """Both instances, and a prompt that they have not seen."""

    prefill: Served
    decode: Served
    case: Case


async def _holder(of: Pair) -> Served:
    """P has a prompt's KV for D, which then finds P gone, and computes the prompt itself."""
    params = await of.prefill.prefill(of.case.prompt)
    of.prefill.kill()
    answer = await of.decode.complete(body_of(of.case.prompt, FEW, params))
    assert tokens_of(answer) == of.case.tokens
    return of.decode


async def _read_holder(of: Pair) -> Served:
    """D is reading."""
    params = await of.prefill.prefill(of.case.prompt)
    freeze(of.prefill)
    reading = asyncio.create_task(of.decode.complete(body_of(of.case.prompt, FEW, params)))
    await asyncio.sleep(IN_FLIGHT_S)
    assert not reading.done()
    of.prefill.kill()
    assert tokens_of(await reading) == of.case.tokens
    return of.decode


async def _reader(of: Pair) -> Served:
    """D waits for what it reads; P has its blocks back when the lease ends."""
    params = await of.prefill.prefill(of.case.prompt)
    freeze(of.prefill)
    reading = asyncio.create_task(of.decode.complete(body_of(of.case.prompt, FEW, params)))
    await asyncio.sleep(IN_FLIGHT_S)
    of.decode.kill()
    await _ends_with_its_instance(reading)
    thaw(of.prefill)
    return of.prefill


async def _decoder(of: Pair) -> Served:
    """D decodes; P has nothing of the request any more."""
    params = await of.prefill.prefill(of.case.prompt)
    decoding = asyncio.create_task(of.decode.complete(body_of(of.case.prompt, ENDLESS, params)))
    await asyncio.sleep(IN_FLIGHT_S)
    of.decode.kill()
    await _ends_with_its_instance(decoding)
    return of.prefill


@asynccontextmanager
async def _pushing(of: Pair) -> AsyncIterator[asyncio.Task[list[int]]]:
    """A request of D's whose prefill P is about to push; D is frozen from then on."""
    dispatched = asyncio.Event()

    async def dispatch(key: str, params: KVTransferDict) -> None:
        freeze(of.decode)
        dispatched.set()
        with contextlib.suppress(httpx.HTTPError):
            await of.prefill.complete(body_of(of.case.prompt, FIRST, params))

    async with metaserver(dispatch) as server:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "metaserver": server.url("k"),
        }
        asking = asyncio.create_task(of.decode.complete(body_of(of.case.prompt, FEW, params)))
        await dispatched.wait()
        await asyncio.sleep(IN_FLIGHT_S)
        yield asyncio.ensure_future(_tokens(asking))


async def _tokens(asking: Awaitable[dict[str, object]]) -> list[int]:
    return tokens_of(await asking)


async def _writer(of: Pair) -> Served:
    """P writes; D finds it dead, and computes the prompt itself."""
    async with _pushing(of) as asking:
        of.prefill.kill()
        thaw(of.decode)
        assert await asking == of.case.tokens
    return of.decode


async def _written_to(of: Pair) -> Served:
    """P writes to D, and stops."""
    async with _pushing(of) as asking:
        of.decode.kill()
        await _ends_with_its_instance(asking)
    return of.prefill


async def _pushed_decoder(of: Pair) -> Served:
    """D decodes what was pushed."""
    asking = asyncio.create_task(ask_across(of.prefill, of.decode, "push", of.case.prompt, ENDLESS))
    await asyncio.sleep(2 * IN_FLIGHT_S)
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
"""By how KV crosses, and who is killed when; each returns who is left."""


async def check_kill(
    model: Path, how: str, name: str, sides: tuple[Side, Side], cases: Sequence[Case]
) -> None:
    """What was asked is answered with the CPU's tokens or fails with its instance; who is left
    gives everything back, and serves on with a new partner.

    Raises:
        AssertionError: it is not so.
    """
    first, second, *_ = cases
    both = (("prefill", sides[0]), ("decode", sides[1]))
    with ExitStack() as stack:
        prefill, decode = start_all(stack, model, how, both, options=OPTIONS)
        left = await KILLS[how, name](Pair(prefill, decode, second))
        await check_idle(left, SURVIVOR_S)
        is_prefill = left is prefill
        [fresh] = start_all(stack, model, how, both[is_prefill:][:1], options=OPTIONS)
        pair = (left, fresh) if is_prefill else (fresh, left)
        assert await ask_across(*pair, how, first.prompt) == first.tokens
        await check_idle(left, SURVIVOR_S)
        await check_idle(fresh, SURVIVOR_S)
