"""Budgets, health, prefixes, metrics and membership: small states, checked as such."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st

from mooncake_proxy.budget import RetryBudget
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import (
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    NoInstance,
    NotFound,
    Rejected,
    UpstreamTimeout,
)
from mooncake_proxy.health import PassiveHealth, Track
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.instances import Fleet, InstanceSpec, Role
from mooncake_proxy.membership import plan
from mooncake_proxy.metrics import Counter, Histogram, Metrics, label_text
from mooncake_proxy.poolfile import parse_pool_file
from mooncake_proxy.prefix import BLOCK_BYTES, PrefixIndex, text_hashes


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.integers(0, 20))
def test_retries_stay_within_reserve_and_ratio(
    steps: list[bool], ratio: float, reserve: int
) -> None:
    budget = RetryBudget(ratio, reserve)
    taken = deposited = 0
    for is_retry in steps:
        if is_retry:
            taken += budget.take()
        else:
            budget.deposit()
            deposited += 1
    assert taken <= reserve + ratio * deposited + 1e-6


def test_hysteresis() -> None:
    track = Track()
    verdicts = [track.observe(good=good, rise=2, fall=3) for good in map(int, "1000110")]  # type: ignore[arg-type]  # 0 and 1
    assert verdicts == [True, None, None, False, None, True, None]


def test_an_ejected_instance_needs_its_row_of_good_checks_again() -> None:
    track = Track()
    for _ in range(9):
        track.observe(good=True, rise=2, fall=3)
    assert track.says_up
    track.note_ejection()
    assert [track.observe(good=True, rise=2, fall=3) for _ in range(2)] == [None, True]


def test_passive_ejection_counts_failures_in_a_row_and_no_error_statuses() -> None:
    health = PassiveHealth(2)
    refused, timeout = ConnectFailed("a", "no"), UpstreamTimeout("a", "silent")
    assert not health.failed("a", refused)
    health.succeeded("a")
    assert not health.failed("a", refused)
    assert not health.failed("a", Rejected("a", 500, {}, b""))
    assert not health.failed("a", DeadlineExceeded("a"))
    assert health.failed("a", timeout)
    assert not health.failed("a", timeout)  # whoever comes back starts anew


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.binary(max_size=2000))
def test_prompts_share_exactly_their_common_blocks(head: bytes, one: bytes, two: bytes) -> None:
    first, second = text_hashes(head + one), text_hashes(head + two)
    num_common = len(head) // BLOCK_BYTES
    assert first[:num_common] == second[:num_common]
    assert len(first) == len(head + one) // BLOCK_BYTES


def test_the_index_knows_who_holds_a_prefix() -> None:
    index = PrefixIndex(capacity=100)
    prompt = bytes(range(256)) * 4
    hashes = text_hashes(prompt)
    index.record(hashes, "a")
    index.record(hashes[:2], "b")
    assert index.cached_tokens(hashes) == {"a": 256, "b": 128}
    index.forget("a")
    assert index.cached_tokens(hashes) == {"b": 128}
    index.record(tuple(range(100)), "c")
    assert len(index) == 100
    assert index.cached_tokens(hashes) == {}


def test_exposition() -> None:
    counter = Counter("c_total", "Text.", ("name",))
    for _ in range(2):
        counter.add('a"\\\n')
    assert list(counter.lines())[-1] == 'c_total{name="a\\"\\\\\\n"} 2'
    histogram = Histogram("h", "Text.")
    histogram.observe(0.002)
    histogram.observe(1e9)
    lines = list(histogram.lines())
    assert 'h_bucket{le="0.001"} 0' in lines
    assert 'h_bucket{le="0.0025"} 1' in lines
    assert 'h_bucket{le="+Inf"} 2' in lines
    assert "h_count 2" in lines
    assert label_text((), ()) == ""


def test_what_workers_count_adds_up() -> None:
    one, two = Metrics(), Metrics()
    for metrics in (one, two):
        metrics.requests.add("/v1/completions", "200")
        metrics.first_token_seconds.observe(0.01)
    total = Metrics.sum_of([one.snapshot(), two.snapshot()])
    assert total.requests.values == {("/v1/completions", "200"): 2.0}
    assert sum(total.first_token_seconds.series[()][:-1]) == 2


def spec(port: int, source: str, role: Role = Role.DECODE) -> InstanceSpec:
    return InstanceSpec(Origin("http", "h", port), role, source=source)


def test_large_counts_are_told_to_the_last_one() -> None:
    counter = Counter("tokens_total", "All.")
    counter.values[()] = 12_345_678.0
    assert list(counter.lines())[-1] == "tokens_total 12345678"
    counter.add()
    assert list(counter.lines())[-1] == "tokens_total 12345679"
    seconds = Histogram("seconds", "Spent.")
    seconds.observe(1234.5678)
    assert "seconds_sum 1234.5678" in list(seconds.lines())


def test_a_source_only_touches_its_own() -> None:
    present = [spec(1, "flags"), spec(2, "file"), spec(3, "file")]
    todo = plan([spec(3, "file"), spec(4, "file")], present, "file")
    assert todo.add == (spec(4, "file"),)
    assert todo.leave == ("http://h:2",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"decode: 3", "Expected `array`"),
        (b"decoders: []", "unknown field `decoders`"),
        (b"decode: [{url: 'http://h:1', colour: red}]", "unknown field `colour`"),
        (b"decode: ['ftp://h']", "ftp://h"),
    ],
)
def test_bad_pool_files_are_explained(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pool_file(content, "pools.yaml")


def test_the_fleet_says_what_is_missing() -> None:
    async def main() -> None:
        fleet = Fleet(ClientContext())
        with pytest.raises(NoInstance, match="no decode instance is configured"):
            fleet.require(Role.DECODE)
        instance = fleet.add(spec(1, "flags"))
        fleet.set_up(instance, up=False, error="refused")
        with pytest.raises(NoInstance, match="http://h:1 down refused"):
            fleet.require(Role.DECODE)
        with pytest.raises(NotFound, match="known: http://h:1"):
            fleet.get("http://h:2")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flow": "pull-push"}, "--flow 'pull-push': wanted one of pull, push"),
        ({"prefill_policy": "best"}, "--prefill-policy 'best'"),
        ({"port": 70000}, "--port 70000"),
        ({"workers": 0}, "--workers 0"),
        ({"otlp_endpoint": "nonsense"}, "--otlp-endpoint 'nonsense': wanted the URL"),
        ({"otlp_endpoint": "collector:4318"}, "such as http://collector:4318"),
        ({"otlp_endpoint": "http://collector:port"}, "--otlp-endpoint"),
        ({"flow": "push", "host": "::"}, "--advertise-url"),
        ({"instances": (spec(1, "a"), spec(1, "b", Role.PREFILL))}, "http://h:1 given twice"),
    ],
)
def test_bad_configurations_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProxyConfig(**settings)  # type: ignore[arg-type]  # wrong on purpose
