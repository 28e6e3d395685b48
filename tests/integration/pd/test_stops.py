"""Graceful shutdown of a prefill instance: its peers can still fetch the KV that it holds for
them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from support.pd import GREEDY, prompt_of
from support.pd_processes import Served, body_of, serving
from support.programs import TINY_LLAMA

PROMPT = prompt_of(200)


@pytest.fixture
def prefill() -> Iterator[Served]:
    with serving(TINY_LLAMA, "prefill") as served:
        yield served


def refuses_by_now(served: Served) -> None:
    """Wait until the instance has received its signal and rejects requests."""
    deadline = time.monotonic() + 30
    while (answer := httpx.get(f"{served.url}/ready")).status_code == 200:
        assert time.monotonic() < deadline, "it still accepts requests"
        time.sleep(0.02)
    assert answer.json()["error"]["code"] == "shutting_down"


def test_prefill_instance_exits_when_its_kv_was_fetched(prefill: Served) -> None:
    with serving(TINY_LLAMA, "decode") as decode:
        held = asyncio.run(prefill.prefill(PROMPT))
        prefill.program.process.send_signal(signal.SIGTERM)
        refuses_by_now(prefill)
        answer = asyncio.run(decode.complete(body_of(PROMPT, GREEDY, held)))
        assert prefill.program.wait() == 0
        assert asyncio.run(decode.figure("mooncake:kv_transfer_loads_total")) == 1
        assert asyncio.run(decode.figure("mooncake:kv_transfer_load_failures_total")) == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "draining is incomplete" not in prefill.program.error_text


def test_second_signal_exits_without_waiting(prefill: Served) -> None:
    asyncio.run(prefill.prefill(PROMPT))
    prefill.program.process.send_signal(signal.SIGTERM)
    refuses_by_now(prefill)
    time.sleep(1.1)  # signals within one second count as one stop
    assert prefill.program.process.poll() is None
    assert prefill.program.end(signal.SIGINT) == 0
    assert (
        "draining is incomplete: 0 requests fail, the KV of 1 is released"
        in prefill.program.error_text
    )
