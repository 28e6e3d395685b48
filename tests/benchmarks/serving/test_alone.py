"""Streams over HTTP from one instance: with and without async scheduling, greedy and sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.figures import Figure, record
from support.served_streams import (
    SAMPLINGS,
    SHARE_OF_LIMIT,
    STREAMS,
    Served,
    StreamTimes,
    run_streams,
)

pytestmark = pytest.mark.timeout(900)
MODES = ("--async-scheduling", "--no-async-scheduling")
Seen = dict[tuple[str, str, int], StreamTimes]


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Measurements so far, by mode, sampling and number of streams."""
    return {}


@pytest.fixture(scope="module", params=MODES)
def instance(request: pytest.FixtureRequest, served: Served) -> Iterator[tuple[str, int]]:
    """The instance's mode and port."""
    with served.instance(request.param) as port:
        yield request.param, port


@pytest.mark.parametrize("num_streams", STREAMS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_streams(
    benchmark: Any,
    instance: tuple[str, int],
    served: Served,
    seen: Seen,
    sampling: str,
    num_streams: int,
) -> None:
    """Async scheduling is compared with the device's bandwidth, and must never be slower than
    without."""
    mode, port = instance
    times = seen[mode, sampling, num_streams] = run_streams(
        port, served.shape, num_streams, sampling
    )
    limit = served.limit(num_streams)
    runs_ahead = mode == MODES[0]
    title = f"{'async' if runs_ahead else 'sync'}, {sampling}, {num_streams} streams"
    wanted = SHARE_OF_LIMIT * limit if runs_ahead else None
    shown = f"reading weights and KV allows {limit:.0f}"
    record(benchmark, times.figure(title, wanted, shown))
    if not runs_ahead and (ahead := seen.get((MODES[0], sampling, num_streams))):
        ratio = ahead.rate / times.rate
        record(benchmark, Figure(f"{title}: async beside it", ratio, 1.0, "times"))
    benchmark.pedantic(lambda: None, rounds=1)
