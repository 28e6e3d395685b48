"""The periodic log line with the engine's statistics."""

from __future__ import annotations

import logging

import pytest

from mooncake_engine.errors import ConfigError
from mooncake_engine.messages import EngineStats
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.server.stats_log import StatsLog, stats_line

BUSY = EngineStats(
    num_running=3,
    num_waiting=6,
    num_swapped=2,
    num_loading=1,
    kv_cache_usage=0.25,
    prefix_cache_queries=300,
    prefix_cache_hits=60,
    prompt_tokens=1000,
    generation_tokens=50,
)


def test_line_has_rates_queues_and_cache_usage() -> None:
    assert stats_line(EngineStats(), BUSY, 10.0) == (
        "prompts: 100.0 tokens/s, generation: 5.0 tokens/s, running: 3, waiting: 4 (1 for KV), "
        "swapped: 2, KV cache usage: 25.0%, prefix cache hit rate: 20.0%"
    )
    assert stats_line(BUSY, BUSY, 10.0).endswith("prefix cache hit rate: -")


def test_lines_are_logged_while_busy_and_once_after(caplog: pytest.LogCaptureFixture) -> None:
    done = EngineStats(prompt_tokens=1000, generation_tokens=80)
    seen = [EngineStats(), EngineStats(), BUSY, BUSY, done, done, done]
    stats_log = StatsLog(lambda: seen.pop(0), 10.0)
    with caplog.at_level(logging.INFO):
        for now in range(0, 65, 5):
            stats_log.tick(float(now))
    running = [record.getMessage().partition("running: ")[2][0] for record in caplog.records]
    assert running == ["3", "3", "0", "0"], "busy, busy, finished, and idle"
    assert not seen


def test_an_interval_of_zero_disables_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stats_log = StatsLog(lambda: BUSY, 0.0)
    with caplog.at_level(logging.INFO):
        stats_log.tick(0.0)
        stats_log.tick(1e9)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slo_ttft_ms": 0.0}, "--slo-ttft must be a number of ms, more than 0, got 0"),
        ({"slo_tbt_ms": float("inf")}, "--slo-tbt must be a number of ms"),
        ({"log_stats_interval_s": -1.0}, "--log-stats-interval must be a number of seconds"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerOptions(**options)  # type: ignore[arg-type]
