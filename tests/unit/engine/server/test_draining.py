"""Draining: which requests an instance still serves after a signal, and when it stops."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from support.asgi import AsgiClient, ManualClient
from support.fake_engine import FakeEngine

from mooncake_engine.server.api_server import Draining
from mooncake_engine.server.app import create_app
from mooncake_engine.server.live_requests import LiveRequests, ShuttingDown
from mooncake_engine.text.tokenizer import Tokenizer


@pytest.fixture
def live() -> LiveRequests:
    return LiveRequests()


@pytest.fixture
def client(engine: FakeEngine, byte_tokenizer: Tokenizer, live: LiveRequests) -> AsgiClient:
    return AsgiClient(create_app(engine, byte_tokenizer, live=live))


def test_no_drain_without_a_signal() -> None:
    assert not Draining(5.0, LiveRequests(), lambda: 0).is_over(1e9)


def test_an_idle_instance_stops_after_two_checks(live: LiveRequests) -> None:
    """The KV that a finished prefill holds is counted a moment after its response."""
    draining = Draining(5.0, live, lambda: 0)
    draining.stop(100.0)
    assert [draining.is_over(now) for now in (100.0, 100.1)] == [False, True]


def test_draining_waits_for_kv_that_a_peer_will_fetch(live: LiveRequests) -> None:
    held = [0, 2, 1, 0, 0]
    draining = Draining(5.0, live, lambda: held.pop(0))
    draining.stop(100.0)
    assert [draining.is_over(101.0) for _ in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("signals", "over_at"),
    [((100.0,), 105.0), ((100.0, 100.5), 105.0), ((100.0, 102.0), 102.0)],
)
def test_requests_may_finish_until_timeout_or_second_signal(
    live: LiveRequests, signals: tuple[float, ...], over_at: float
) -> None:
    async def run() -> None:
        draining = Draining(5.0, live, lambda: 0)
        with live.tracking("a") as ending:
            for now in signals:
                assert not draining.is_over(now)
                draining.stop(now)
            with pytest.raises(ShuttingDown), live.tracking("b"):
                pass
            if over_at > signals[-1]:
                assert not draining.is_over(over_at - 0.1)
            assert not ending.done()
            assert draining.is_over(over_at)
            assert isinstance(ending.result(), ShuttingDown)

    asyncio.run(run())


def test_new_requests_are_rejected_and_health_is_503(
    client: AsgiClient, live: LiveRequests
) -> None:
    for path in ("/ready", "/health", "/ping"):
        assert client.get(path).status_code == 200
    assert client.request("POST", "/ping").status_code == 200
    live.close()
    for answer in (
        client.post("/v1/completions", prompt="tea"),
        client.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
        client.get("/health"),
        client.get("/ready"),
        client.get("/ping"),
    ):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "shutting_down"
    assert client.get("/metrics").status_code == 200
    assert client.post("/abort", request_id="a").status_code == 200


@pytest.mark.parametrize(("stream", "status"), [("true", 200), ("false", 503)])
def test_failed_requests_receive_an_error(
    client: AsgiClient, engine: FakeEngine, live: LiveRequests, stream: str, status: int
) -> None:
    async def run() -> ManualClient:
        engine.hold_at, engine.held, engine.release = 1, asyncio.Event(), asyncio.Event()
        waiting = ManualClient(f'{{"prompt":"tea","stream":{stream}}}'.encode())
        serving = asyncio.ensure_future(client.app(waiting.scope, waiting.receive, waiting.send))
        await engine.held.wait()
        live.close()
        live.fail_all()
        with suppress(asyncio.CancelledError):
            await serving
        return waiting

    waiting = asyncio.run(run())
    assert waiting.sent[0]["status"] == status
    bodies = [message.get("body", b"") for message in waiting.sent]
    assert b'"code":"shutting_down"' in b"".join(bodies)
    assert not waiting.sent[-1].get("more_body", False)
    assert len(engine.left_early) == 1
