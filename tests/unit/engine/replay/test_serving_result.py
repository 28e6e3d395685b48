"""The statistics of ``bench serve``, compared with vLLM's definitions computed by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.latency_summary import Record
from mooncake_engine.replay.serving_command import Traffic
from mooncake_engine.replay.serving_result import ServingTargets, serving_result, serving_table

TARGETS = ServingTargets(("ttft", "tpot", "itl", "e2el"), (50.0, 99.9), {"ttft": 150, "tpot": 60})
FIRST = Record(0, 10.0, 10.0, 11.0, [10.1, 10.2, 10.4], 7, 4, pieces=["a", "b", "c"])
SECOND = Record(1, 10.0, 10.3, 11.0, [10.5], 5, 1, pieces=["d"])
FAILED = Record(2, 10.0, 10.0, 10.1, error="status 500: no")
SETTING = {"request_rate": "inf", "max_concurrency": None}


def test_statistics_are_vllms() -> None:
    found = serving_result([FIRST, SECOND, FAILED], 2.0, TARGETS)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 5)
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 2.5)
    assert found["total_token_throughput"] == 8.5
    assert found["mean_ttft_ms"] == pytest.approx(150)
    assert found["std_ttft_ms"] == pytest.approx(50)
    assert found["mean_tpot_ms"] == pytest.approx(100), "of 4 tokens 3 are after the first"
    assert found["median_itl_ms"] == pytest.approx(150)
    assert found["p50_e2el_ms"] == pytest.approx(300)
    assert found["p99.9_e2el_ms"] == pytest.approx(399.8)
    assert found["generated_texts"] == ["abc", "d", ""]
    assert found["errors"] == ["", "", "status 500: no"]
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (4.0, 2)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    for limits, good in (({"ttft": 150}, 0.5), ({"ttft": 250}, 1.0), ({"tpot": 60}, 0.5)):
        targets = ServingTargets(("ttft",), (99.0,), {name: ms for name, ms in limits.items()})
        assert serving_result([FIRST, SECOND], 2.0, targets)["request_goodput"] == good
    none = ServingTargets(("ttft",), (99.0,), {})
    assert serving_result([FIRST], 2.0, none)["request_goodput"] is None


def test_the_table_has_the_lines_that_scripts_parse() -> None:
    table = serving_table(serving_result([FIRST, SECOND], 2.0, TARGETS), TARGETS, SETTING)
    lines = table.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    for line in (
        "Successful requests:                     2         ",
        "Request throughput (req/s):              1.00      ",
        "Request goodput (req/s):                 0.00      ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          150.00    ",
        "P99.9 E2EL (ms):                         399.80    ",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": ("ttft", "speed")}, "must be of ttft, tpot, itl, e2el, got 'speed'"),
        ({"percentiles": (101.0,)}, "must be 0 to 100"),
        ({"goodput": {"itl": 5.0}}, "--goodput takes ttft, tpot, e2el"),
        ({"goodput": {"ttft": -1.0}}, "got ttft:-1"),
    ],
)
def test_unknown_metrics_are_rejected(changes: dict[str, object], words: str) -> None:
    values = {"metrics": ("ttft",), "percentiles": (99.0,), "goodput": {}} | changes
    with pytest.raises(ConfigError, match=words):
        ServingTargets(**values)  # type: ignore[arg-type]


def test_the_last_time_matches_the_rate() -> None:
    assert Traffic().times_s(3) == [0.0, 0.0, 0.0]
    for burstiness in (0.3, 1.0, 20.0):
        times = Traffic(rate=4.0, burstiness=burstiness).times_s(200)
        assert times == sorted(times)
        assert times[-1] == pytest.approx(50)
    even = Traffic(rate=4.0, burstiness=float("inf")).times_s(3)
    assert even == pytest.approx([0.25, 0.5, 0.75])


def test_burstiness_makes_intervals_less_even() -> None:
    def spread(burstiness: float) -> float:
        times = Traffic(rate=1.0, burstiness=burstiness).times_s(2000)
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps)

    assert spread(0.25) == pytest.approx(4, rel=0.3), "a gamma's variance is 1 / shape"
    assert spread(4.0) == pytest.approx(0.25, rel=0.3)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_up_shortens_intervals(strategy: str) -> None:
    traffic = Traffic(burstiness=float("inf"), ramp_up=strategy, start_rate=1, end_rate=10)
    times = traffic.times_s(10)
    assert times[0] == pytest.approx(1.0)
    assert times[-1] - times[-2] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": 0.0}, "--request-rate must be more than 0"),
        ({"burstiness": 0.0}, "--burstiness must be more than 0"),
        ({"max_concurrency": 0}, "--max-concurrency must be more than 0"),
        ({"ramp_up": "linear"}, "needs --ramp-up-start-rps below"),
        ({"ramp_up": "linear", "rate": 3.0}, "exclude each other"),
        ({"ramp_up": "exponential", "start_rate": 0, "end_rate": 5}, "can't start from 0"),
    ],
)
def test_invalid_traffic_is_rejected(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Traffic(**changes)  # type: ignore[arg-type]
