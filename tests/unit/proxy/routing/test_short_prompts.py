"""Which prompts a decode instance prefills itself."""

from __future__ import annotations

import pytest

from mooncake_proxy.routing.short_prompts import (
    MAX_LEARNT_TOKENS,
    MAX_PROMPTS_IN_FLIGHT,
    MIN_SAMPLES,
    ShortPrompts,
)


@pytest.mark.parametrize(
    ("limit", "tokens", "is_short"), [(0, 1, False), (100, 100, True), (100, 101, False)]
)
def test_configured_length(limit: int, tokens: int, is_short: bool) -> None:
    assert ShortPrompts(limit).is_short(tokens, 1) is is_short


def test_concurrent_local_prefills_are_limited() -> None:
    rule = ShortPrompts(100)
    rule.num_tokens_in_flight = 100 * MAX_PROMPTS_IN_FLIGHT
    assert not rule.is_short(1, 1)
    assert rule.is_short(100, 2)


def test_length_is_learnt_from_disaggregated_requests() -> None:
    rule = ShortPrompts(None)
    for _ in range(MIN_SAMPLES - 1):
        rule.note_prefill(1000, 0.5)
        rule.note_handover(0.05)
    assert rule.limit == 0, "too few"
    rule.note_prefill(0, 0.5)  # all cached: no information
    assert rule.limit == 0
    rule.note_prefill(2000, 1.0)
    rule.note_handover(0.05)
    assert rule.limit == 100, "0.5 ms per token, 50 ms for a KV transfer"
    for _ in range(100):
        rule.note_handover(1e6)
    assert rule.limit == MAX_LEARNT_TOKENS
