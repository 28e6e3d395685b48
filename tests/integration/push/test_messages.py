"""Messages of a prefill instance are lost: no block is lost, and no token is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.pd import ask, instance, prompt_of
from support.pd_relay import Relay, dropping, relay, unreliable
from support.push import PushPair, ask_pushed, push_pair

from mooncake_kv import side_channel
from mooncake_kv.params import KVTransferDict

PROMPT = prompt_of(150)
LEASE_S = 1.0
CLEAN_S = 20.0

Scenario = Callable[[list[int], PushPair, Relay], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def short_retry_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry requests sooner than in production, where responses come from other hosts."""
    monkeypatch.setattr(side_channel, "TRY_TIMEOUT_S", 0.3)


def run(model: Path, scenario: Scenario) -> None:
    """Run a scenario on a pair whose prefill instance reaches D through a relay."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        async with push_pair(model, lease_s=LEASE_S) as both:
            host, port = (
                getattr(both.decode.core.report().topology, name) for name in ("host", "port")
            )
            async with relay(host, port) as between:
                dispatch = both.dispatch

                async def through(key: str, params: KVTransferDict) -> None:
                    await dispatch(key, {**params, "remote_port": between.port})

                both.metaserver.dispatch = through
                await scenario(expected, both, between)
                await both.check_clean(CLEAN_S)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_lost_repeated_and_late_messages(model: Path, seed: int) -> None:
    async def scenario(expected: list[int], both: PushPair, between: Relay) -> None:
        between.delivery = unreliable(seed)
        answers = await asyncio.gather(*(ask_pushed(both, PROMPT) for _ in range(6)))
        assert [answer.tokens for answer in answers] == [expected] * 6
        assert len(between.seen) > 12

    run(model, scenario)


@pytest.mark.parametrize("lost", ["hello", "welcome", "pushopen", "leasereply"])
def test_message_type_that_never_arrives(model: Path, lost: str) -> None:
    """Without this message no P is admitted, or none learns of it: D prefills locally."""

    async def scenario(expected: list[int], both: PushPair, between: Relay) -> None:
        between.delivery = dropping(lost)
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert both.decode.stat("load_failures") == 1

    run(model, scenario)


@pytest.mark.parametrize("lost", [("pushed",), ("pushed", "renew")], ids=str)
def test_missing_completion_message_is_requested(model: Path, lost: tuple[str, ...]) -> None:
    """Both instances live and all KV has arrived: nothing has to be recomputed."""

    async def scenario(expected: list[int], both: PushPair, between: Relay) -> None:
        between.delivery = dropping(*lost)
        assert (await ask_pushed(both, PROMPT)).tokens == expected
        assert "pushed" in between.seen
        assert both.decode.stat("load_failures") == 0

    run(model, scenario)
