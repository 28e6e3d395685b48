"""2,000 streams, of which clients break off one in twenty, while instances are killed all the time.

No client may receive a wrong answer or none, and at the end nothing is held: no request is counted
on an instance, and no P holds KV that was neither fetched nor released.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, FakeInstance, fake_deployment, text_of
from support.proxy_fakes_client import events_of, streamed_text

from mooncake_proxy.http1.upstream_connection import ClientLimits
from mooncake_proxy.pool.health_checks import HealthConfig

NUM_STREAMS = 2000
NUM_AT_ONCE = 64
DISCONNECTS = 0.05
NUM_TOKENS = 12
SEED = 20


@dataclass
class Outcome:
    """The results of all streams."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flow", ["pull", "push"])
def test_storm(flow: str) -> None:
    async def main() -> None:
        health = HealthConfig(interval_s=0.05, timeout_s=1.0, rise=1, fall=2)
        limits = ClientLimits(first_byte_timeout_s=10.0, stall_timeout_s=10.0)
        settings: dict[str, Any] = {"health": health, "client": limits, "flow": flow}
        async with fake_deployment(num_prefills=3, num_decodes=3, retry_ratio=1.0, **settings) as s:
            for fake in (*s.prefills, *s.decodes):
                fake.behaviour.token_delay_s = 0.001
            outcome = await _storm(s)
            await _settle(s)
            _judge(s, outcome)

    uvloop.run(main())


async def _storm(s: FakeDeployment) -> Outcome:
    outcome = Outcome()
    numbers = iter(range(NUM_STREAMS))
    rng = Random(SEED)

    async def client() -> None:
        for number in numbers:
            breaks_off = rng.random() < DISCONNECTS
            await _one(s, number, outcome, rng.randrange(NUM_TOKENS) if breaks_off else None)

    killer = asyncio.ensure_future(_kill_now_and_then(s, Random(SEED)))
    await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
    killer.cancel()
    await asyncio.wait({killer})
    return outcome


async def _kill_now_and_then(s: FakeDeployment, rng: Random) -> None:
    """Kill one instance at a time and restart it at its old address."""
    while True:
        await asyncio.sleep(0.15)
        victim = rng.choice([*s.prefills, *s.decodes])
        await victim.kill()
        try:
            await asyncio.sleep(0.1)
        finally:
            await victim.start()


async def _one(s: FakeDeployment, number: int, outcome: Outcome, leave_after: int | None) -> None:
    """Run one stream; the client disconnects after `leave_after` events, if given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
    body = {"model": "m", "prompt": f"storm {number}", "max_tokens": NUM_TOKENS, "stream": True}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: s{number}\r\n"
        f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    try:
        if leave_after is not None:
            for _ in range(leave_after):
                await asyncio.wait_for(reader.readline(), 20)
            outcome.counts["left"] += 1
            return
        answer = await asyncio.wait_for(reader.read(), 20)
        outcome.counts[_verdict(number, answer, outcome)] += 1
    finally:
        writer.transport.abort()


def _verdict(number: int, answer: bytes, outcome: Outcome) -> str:
    """The kind of the answer; anything wrong with it is recorded in the outcome."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    if status != "200":
        if "error" not in json.loads(rest):
            outcome.wrong.append(f"{number}: {status} without an OpenAI error: {rest!r}")
        return f"status {status}"
    text = _unchunked(rest).decode()
    events = events_of(text)
    received = streamed_text(events)
    ids = {event["id"] for event in events if isinstance(event, dict) and "id" in event}
    if ids - {f"cmpl-s{number}"} and not _is_retry_id(ids, number):
        outcome.wrong.append(f"{number}: ids {ids}")
    if not text_of(NUM_TOKENS).startswith(received):
        outcome.wrong.append(f"{number}: text {received!r}")
    if events and events[-1] == "[DONE]":
        if received != text_of(NUM_TOKENS):
            outcome.wrong.append(f"{number}: [DONE] after {received!r}")
        return "whole"
    if not events or "error" not in events[-1]:
        outcome.wrong.append(f"{number}: ends without [DONE] and without an error: {text[-200:]!r}")
    return "error event"


def _is_retry_id(ids: set[str], number: int) -> bool:
    """Whether there is one id, that of a later attempt whose stream was the first the client
    saw."""
    return len(ids) == 1 and next(iter(ids)).startswith(f"cmpl-s{number}-")


def _unchunked(data: bytes) -> bytes:
    """The body of a chunked answer."""
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)


async def _settle(s: FakeDeployment) -> None:
    """Wait until no request runs and no connection is in use, but for health checks, which begin
    again and again: a connection that stays in use is found here."""

    def is_busy() -> bool:
        return bool(s.app.admission.num_running) or any(c.is_busy for c in s.app.client.connections)

    async def quiet() -> None:
        while is_busy():  # noqa: ASYNC110  # nothing signals it
            await asyncio.sleep(0.02)

    await asyncio.sleep(0.3)
    await asyncio.wait_for(quiet(), 10)


def _judge(s: FakeDeployment, outcome: Outcome) -> None:
    print(dict(outcome.counts))
    assert outcome.wrong == []
    assert sum(outcome.counts.values()) == NUM_STREAMS
    assert outcome.counts["left"] > NUM_STREAMS * DISCONNECTS / 2
    assert outcome.counts["whole"] > NUM_STREAMS * 0.7
    assert [instance.num_running for instance in s.app.router.pool] == [0] * 6
    assert s.app.router.metaserver.sessions == {}
    leaked = [held for fake in s.prefills for held in _never_fetched(fake, s.decodes)]
    aborts = s.app.router.metrics.aborts.values
    undelivered = sum(number for (status,), number in aborts.items() if status != "200")
    assert len(leaked) <= undelivered, leaked


def _never_fetched(fake: FakeInstance, decodes: list[FakeInstance]) -> list[str]:
    """KV that this P still holds: not fetched by a D and not released, and P has not died since."""
    fetched = {
        seen.body["kv_transfer_params"]["remote_request_id"]
        for decode in decodes
        for seen in decode.generated
        if "remote_request_id" in (seen.body.get("kv_transfer_params") or {})
    }
    released = set(fake.released)
    return [
        f"{held} {'cut off' if held.partition(':')[2] in fake.cut_off else ''}"
        for held in fake.holding
        if held not in fetched and held not in released
    ]
