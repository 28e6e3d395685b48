"""What it costs the proxy to be able to continue a stream elsewhere: every event's tokens are
recorded, beside forwarding events as they are."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.figures import Figure, record

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint
from mooncake_proxy.flows.stream_forwarder import StreamForwarder
from mooncake_proxy.flows.token_record import RecordingForwarder, TokenRecord

NUM_EVENTS = 5_000
EVENTS = [
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,'
    b'"token_ids":[%d]}]}\n\n' % token_id
    for token_id in range(100, 100 + NUM_EVENTS)
]
MAX_RATIO = {True: 4.5, False: 8.0}


def forwarder(record: TokenRecord | None) -> StreamForwarder:
    """A forwarder of a chat that has begun, whose client reads nothing."""
    request = SimpleNamespace(has_started=True, write=len)
    context: Any = SimpleNamespace(
        tenant=None, is_committed=False, request=request, answer_id="chatcmpl-1"
    )
    if record is None:
        return StreamForwarder(context, "d", lambda: None)
    return RecordingForwarder(context, "d", lambda: None, record)


def seconds(forwarder: StreamForwarder) -> float:
    """CPU seconds per event."""
    started = time.process_time()
    for event in EVENTS:
        forwarder.feed(event)
    return (time.process_time() - started) / NUM_EVENTS


@pytest.mark.parametrize("continues_answer", [True, False], ids=["ours", "others"])
def test_recording_an_event(benchmark: Any, continues_answer: bool) -> None:
    plain, recorded = [], []

    def measure() -> None:
        plain.append(seconds(forwarder(None)))
        of_chat = TokenRecord(
            OpenAIEndpoint.CHAT,
            shows_ids=False,
            may_migrate=True,
            continues_answer=continues_answer,
        )
        recorded.append(seconds(forwarder(of_chat)))
        assert len(of_chat.generated) == NUM_EVENTS

    benchmark.pedantic(measure, rounds=25, warmup_rounds=1)
    ratio = min(recorded) / min(plain)
    name = "proxy: event of an instance of ours" if continues_answer else "proxy: event of others"
    shown = f"{1e6 * min(recorded):.1f} µs, forwarded as it is {1e6 * min(plain):.1f} µs"
    limit = MAX_RATIO[continues_answer]
    record(benchmark, Figure(f"{name}, recorded", ratio, limit, "x", False, shown))
