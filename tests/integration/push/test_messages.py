"""What a prefill instance says goes astray: no block is lost, no token is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.pd import ask, instance, prompt_of
from support.pd_relay import Relay, losing, relay, unreliable
from support.push import PushPair, ask_pushed, push_pair

from mooncake_kv import side_channel
from mooncake_kv.params import KVTransferDict

PROMPT = prompt_of(150)
LEASE_S = 1.0
CLEAN_S = 20.0

Scenario = Callable[[list[int], PushPair, Relay], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are repeated sooner than in production, where answers come from other hosts."""
    monkeypatch.setattr(side_channel, "TRY_TIMEOUT_S", 0.3)


def run(model: Path, scenario: Scenario) -> None:
    """Run a scenario on a pair whose prefill instance reaches the other through a relay."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with push_pair(model, lease_s=LEASE_S) as both:
            host, port = (getattr(both.decode.core.topology(), name) for name in ("host", "port"))
            async with relay(host, port) as between:
                dispatch = both.dispatch

                async def through(key: str, params: KVTransferDict) -> None:
                    await dispatch(key, {**params, "remote_port": between.port})

                both.metaserver.dispatch = through
                await scenario(expected, both, between)
                await both.check_clean(CLEAN_S)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_messages_lost_repeated_and_late(model: Path, seed: int) -> None:
    async def scenario(expected: list[int], both: PushPair, between: Relay) -> None:
        between.fate = unreliable(seed)
        answers = await asyncio.gather(*(ask_pushed(both, PROMPT) for _ in range(6)))
        assert [answer.tokens for answer in answers] == [expected] * 6
        assert len(between.seen) > 12

    run(model, scenario)


@pytest.mark.parametrize("lost", ["hello", "welcome", "pushopen", "leasereply"])
def test_a_kind_of_message_that_never_arrives(model: Path, lost: str) -> None:
    """Without it nobody is let in, or knows it: the decode instance computes for itself."""

    async def scenario(expected: list[int], both: PushPair, between: Relay) -> None:
        between.fate = losing(lost)
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario)


@pytest.mark.parametrize("lost", [("pushed",), ("pushed", "renew")], ids=str)
def test_an_ending_that_never_arrives_is_asked_for(model: Path, lost: tuple[str, ...]) -> None:
    """Both live, and the KV is all there: nothing needs to be computed again."""

    async def scenario(expected: list[int], both: PushPair, between: Relay) -> None:
        between.fate = losing(*lost)
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert "pushed" in between.seen
        assert both.decode.stat("load_failures") == 0

    run(model, scenario)
