"""The paced backend: work takes time, and events complete in order after their work."""

from __future__ import annotations

import time
from typing import cast

import pytest
import torch

from mooncake_hal.backend import AttentionBatch, SamplingMetadata, SamplingOps
from mooncake_hal.errors import HalError
from mooncake_hal.null.paced_backend import PacedBackend

DECODE_S, TOKEN_S = 0.03, 0.01


def batch(query_lens: tuple[int, ...]) -> AttentionBatch:
    num_tokens, one = sum(query_lens), torch.ones(1, dtype=torch.int32)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    num_decodes = query_lens.count(1)
    return AttentionBatch(num_decodes, one, one, one[None], slots, 16, query_lens, query_lens)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> PacedBackend:
    monkeypatch.setenv("MOONCAKE_HAL_PACED", f"{DECODE_S * 1e6} {TOKEN_S * 1e6}")
    return PacedBackend()


def test_work_runs_sequentially_at_the_pace(backend: PacedBackend) -> None:
    query, cache = torch.zeros(3, 2, 4), torch.zeros(1, 16, 2, 4)
    start = time.perf_counter()
    events = []
    backend.ops.decode_attention(query[:1], cache, cache, batch((1,)), 1.0)
    for attention in (backend.ops.decode_attention, backend.ops.prefill_attention):
        events.append(backend.runtime.event(0))
        events[-1].record()
        attention(query, cache, cache, batch((3,)), 1.0)
    events.append(backend.runtime.event(0))
    events[-1].record()
    assert not events[0].query(), "launches do not wait for the device"
    passed = []
    for event in events:
        event.synchronize()
        assert event.query()
        passed.append(time.perf_counter() - start)
    wanted = [DECODE_S, 2 * DECODE_S, 2 * DECODE_S + 3 * TOKEN_S]
    assert all(a >= b - 0.001 for a, b in zip(passed, wanted, strict=True)), passed


def test_graph_replay_takes_the_time_of_the_captured_work(backend: PacedBackend) -> None:
    query, cache = torch.zeros(1, 2, 4), torch.zeros(1, 16, 2, 4)

    def attend_twice() -> None:
        for _ in range(2):
            backend.ops.decode_attention(query, cache, cache, batch((1,)), 1.0)

    graph = backend.runtime.capture(attend_twice)
    event = backend.runtime.event(0)
    event.record()
    assert event.query(), "capturing launches nothing"
    start = time.perf_counter()
    graph.replay()
    event.record()
    assert not event.query()
    event.synchronize()
    assert time.perf_counter() - start >= 2 * DECODE_S - 0.001


def test_idle_device_starts_at_once(backend: PacedBackend) -> None:
    event = backend.runtime.event(0)
    event.record()
    assert event.query()


def test_greedy_tokens_are_the_first_of_equal_logits(backend: PacedBackend) -> None:
    logits = backend.ops.linear(torch.ones(3, 4), torch.ones(7, 4), None).to(torch.bfloat16)
    assert cast(SamplingOps, backend.ops).argmax(logits).tolist() == [0, 0, 0]


def test_changed_logits_decide_the_token(backend: PacedBackend) -> None:
    logits = torch.full((3, 7), -torch.inf)
    logits[0, 5] = logits[1, 2] = 0.0
    ops = cast(SamplingOps, backend.ops)
    assert ops.argmax(logits).tolist() == [5, 2, -1]
    assert ops.sample(logits[:2], SamplingMetadata(*torch.ones(5, 2))).tolist() == [5, 2]


@pytest.mark.parametrize("value", ["", "3", "a b", "1 2 3"])
def test_invalid_pace_is_rejected(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_PACED", value)
    with pytest.raises(HalError, match="two numbers of microseconds"):
        PacedBackend()
