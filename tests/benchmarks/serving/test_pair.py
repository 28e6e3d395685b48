"""A pair on one device, compared with an instance of both roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from support.figures import Figure, record
from support.served_streams import STREAMS, Served, StreamTimes, first_token_ms, run_streams

pytestmark = pytest.mark.timeout(900)
PAIR_SHARE = 0.97
MOST_ADDED_MS = 5.0


@dataclass(frozen=True)
class SingleInstanceResults:
    """Results of a single instance: by number of streams, and until a single request's first
    token."""

    by_streams: dict[int, StreamTimes]
    first_ms: float


@pytest.fixture(scope="module")
def alone(served: Served) -> SingleInstanceResults:
    """Measured before the pair starts: three instances do not fit one device."""
    with served.instance("--async-scheduling") as port:
        first_ms = first_token_ms(port, served.shape)
        by_streams = {count: run_streams(port, served.shape, count, "greedy") for count in STREAMS}
    return SingleInstanceResults(by_streams, first_ms)


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_pair_on_one_device(
    benchmark: Any, served: Served, alone: SingleInstanceResults, flow: str
) -> None:
    with served.pair(flow) as port:
        first_ms = first_token_ms(port, served.shape)
        shown = f"alone {alone.first_ms:.1f} ms, apart {first_ms:.1f} ms"
        title, added = f"PD, {flow}: added to the first token", first_ms - alone.first_ms
        record(benchmark, Figure(title, added, MOST_ADDED_MS, "ms", False, shown))
        for count, by_itself in alone.by_streams.items():
            times = run_streams(port, served.shape, count, "greedy")
            wanted = PAIR_SHARE * by_itself.rate
            title = f"PD, {flow}, {count} streams"
            record(
                benchmark,
                times.figure(title, wanted, f"alone {by_itself.rate:.0f} tokens/s, {by_itself}"),
            )
    benchmark.pedantic(lambda: None, rounds=1)
