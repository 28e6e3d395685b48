"""Token buckets for requests and tokens per minute, and the format of keys files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mooncake_proxy.api.api_keys import ApiKey, read_key_file, read_keys
from mooncake_proxy.api.rate_limits import RateLimits, duration
from mooncake_proxy.errors import ConfigError, RateLimited

KEY = ApiKey("secret", "team", requests_per_minute=60, tokens_per_minute=6000)


def test_minute_budget_may_be_used_at_once_and_refills_per_second() -> None:
    limits = RateLimits([KEY], now=0.0)
    for _ in range(60):
        limits.take("team", 10, now=0.0)
    with pytest.raises(RateLimited, match="requests per min") as caught:
        limits.take("team", 10, now=0.0)
    assert caught.value.wait_s == pytest.approx(1.0)
    assert caught.value.type == "requests"
    limits.take("team", 10, now=1.0)
    with pytest.raises(RateLimited):
        limits.take("team", 10, now=1.5)


def test_unused_tokens_are_returned() -> None:
    limits = RateLimits([KEY], now=0.0)
    limits.take("team", 6000, now=0.0)
    with pytest.raises(RateLimited, match="tokens per min") as caught:
        limits.take("team", 600, now=0.0)
    assert caught.value.wait_s == pytest.approx(6.0)
    limits.settle("team", -5000)
    limits.take("team", 600, now=0.0)


def test_request_larger_than_bucket_runs_when_bucket_is_full() -> None:
    limits = RateLimits([KEY], now=0.0)
    limits.take("team", 9000, now=0.0)
    with pytest.raises(RateLimited) as caught:
        limits.take("team", 9000, now=0.0)
    assert caught.value.wait_s == pytest.approx(90.0)
    limits.take("team", 9000, now=90.0)


def test_replaced_keys_keep_what_they_have_spent() -> None:
    limits = RateLimits([KEY, ApiKey("other", "gone", requests_per_minute=1)], now=0.0)
    limits.take("team", 4000, now=0.0)
    limits.set_keys([KEY], now=0.0)
    assert "gone" not in limits
    limits.take("team", 2000, now=0.0)
    with pytest.raises(RateLimited, match="tokens per min"):
        limits.take("team", 1, now=0.0)
    more = ApiKey("secret", "team", requests_per_minute=0, tokens_per_minute=12_000)
    limits.set_keys([more, ApiKey("new", "new", tokens_per_minute=100)], now=0.0)
    limits.take("team", 6000, now=0.0)
    limits.take("new", 100, now=0.0)
    with pytest.raises(RateLimited):
        limits.take("team", 1, now=0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4000)), max_size=60))
def test_usage_never_exceeds_limit_plus_one_minute(requests: list[tuple[float, int]]) -> None:
    limits, now, taken = RateLimits([KEY], now=0.0), 0.0, 0
    for gap, tokens in requests:
        now += gap
        try:
            limits.take("team", tokens, now)
            taken += tokens
        except RateLimited:
            continue
    assert taken <= 6000 + now * 100 + 1e-6


def test_workers_share_admitted_amounts() -> None:
    first, second = RateLimits([KEY], now=0.0), RateLimits([KEY], now=0.0)
    for _ in range(60):
        first.take("team", 1, now=0.0)
    second.spent_elsewhere(first.spent())
    with pytest.raises(RateLimited):
        second.take("team", 1, now=0.0)
    assert first.spent() == {}


def test_durations_have_openai_format() -> None:
    assert [duration(s) for s in (0.0, 0.02, 1.0, 12.5, 360.0)] == [
        "0ms", "20ms", "1s", "12.5s", "6m0s",
    ]  # fmt: skip


def write(tmp_path: Path, content: object) -> str:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_keys_file_sets_permissions(tmp_path: Path) -> None:
    entry = {"key": "k", "name": "team", "classes": ["strict"], "weight": 2.5, "models": ["qwen"]}
    found = read_key_file(
        write(tmp_path, {"keys": [entry], "classes": {"strict": {"ttft": 500, "tbt": "5x"}}})
    )
    [key] = found.keys
    assert (key.name, key.weight, key.models) == ("team", 2.5, {"qwen"})
    assert str(found.classes["strict"].ttft) == "500"
    lines = tmp_path / "lines"
    lines.write_text("# ours\none\n\ntwo\n")
    assert [each.key for each in read_key_file(str(lines)).keys] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"keys": []}, "holds no key"),
        ({"keys": [{"key": "k", "limit": 3}]}, "unknown field"),
        ({"keys": [{"key": "k", "requests_per_minute": 3}]}, "with limits a name"),
        ({"keys": [{"key": "k", "name": "a", "weight": 0}]}, "weight above 0"),
        ({"keys": [{"key": "k", "name": "a"}, {"key": "l", "name": "a"}]}, "name is given twice"),
        ({"keys": [{"key": "k", "name": "a"}, {"key": "k", "name": "b"}]}, "key is given twice"),
    ],
)
def test_invalid_keys_files_are_reported(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_key_file(write(tmp_path, content))


def test_short_keys_are_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": "sk-1"}, {"key": "k" * 16}]}))
    assert len(read_key_file(str(path)).keys) == 2
    path.write_text(json.dumps({"keys": [{"key": "k" * 16}]}))
    read_key_file(str(path))
    lines = tmp_path / "keys"
    lines.write_text("sk-1\nsk-2\n")
    assert read_keys(str(lines)) == {"sk-1", "sk-2"}
    counts = [message.partition(" have fewer than 16 characters")[0] for message in caplog.messages]
    assert counts == [f"key file {path}: 1 of its keys", f"key file {lines}: 2 of its keys"]
