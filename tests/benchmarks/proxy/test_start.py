"""The proxy's time from process start to listening."""

from __future__ import annotations

from pathlib import Path

from support.figures import Figure, record
from support.running import running


def test_proxy_starts_within_a_second(benchmark, tmp_path: Path) -> None:
    pools = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:10"]

    def start() -> None:
        context = running("mooncake_proxy", "--port", "0", *pools, log=tmp_path / "log")
        with context:
            pass

    benchmark.pedantic(start, rounds=5, warmup_rounds=1)
    record(
        benchmark,
        Figure(
            "proxy: start, import, listen, stop",
            benchmark.stats.stats.median,
            1.0,
            "s",
            at_least=False,
        ),
    )
