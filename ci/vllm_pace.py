"""Measures a decode instance's TPOT while it loads KV, for ``bench_vllm.py``.

One stream runs on the instance for all of a measurement, which consists of turns, and a turn of
three windows: nothing else runs; KV is loaded; as many requests come whose KV is cached. Only the
windows of one turn, which lie within two seconds, are compared. Streams that ran one after another
differed by more than the bound, because of whatever else a host did in the meantime.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import median

from vllm_requests import timed_choices
from vllm_serving import Json

BY_ITSELF, LOADS, HITS = "alone", "loads", "prefix hits"
"""The kinds of windows."""
ORDERS = ((BY_ITSELF, LOADS, HITS), (LOADS, BY_ITSELF, HITS), (LOADS, HITS, BY_ITSELF))
"""Orders of a turn's windows, used alternately; the loads of a turn fill the cache for its hits."""
WINDOW_S, PERIOD_S = 0.5, 0.1
REQUESTS_PER_WINDOW = round(WINDOW_S / PERIOD_S)
MIDDLE = 0.64
"""Half the width of the 80 % confidence interval of a median, in ranks, divided by the square root
of the number of values: 1.28 standard deviations of a binomial distribution."""

Turn = dict[str, float]
"""TPOT in seconds by kind of window."""


@dataclass
class TokenStream:
    """The tokens of a stream that have arrived so far: the times of arrival, and the number of
    tokens up to each. vLLM sends several tokens at once to a client that reads late."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, now: float, num_tokens: int) -> None:
        """Add tokens that arrived together."""
        self.times.append(now)
        self.counts.append(num_tokens + (self.counts[-1] if self.counts else 0))

    def tpot_s(self, begin: float, end: float) -> float:
        """Mean time between two tokens that arrived within a window; the length of the window if
        fewer than two did, because the stream stood still."""
        inside = [at for at, when in enumerate(self.times) if begin <= when <= end]
        if len(inside) < 2:
            return end - begin
        first, last = inside[0], inside[-1]
        num_tokens = self.counts[last] - self.counts[first]
        return (self.times[last] - self.times[first]) / num_tokens


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio within turns, and the interval that contains the true median with a
    probability of 80 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


def ratio_of(turns: Sequence[Turn], kind: str, by: str) -> Ratio:
    """TPOT in the windows of one kind, divided by that in the windows of another kind of the same
    turns."""
    found = sorted(turn[kind] / turn[by] for turn in turns)
    count, half = len(found), math.ceil(MIDDLE * math.sqrt(len(found)))
    low, high = max(0, count // 2 - half), min(count - 1, (count - 1) // 2 + half)
    return Ratio(median(found), found[low], found[high])


def measure_turns(
    url: str,
    stream: Json,
    loads: Sequence[Sequence[Json]],
    send: Callable[[Json], object],
    cached: Callable[[Json], Json],
) -> list[Turn]:
    """Measure turns while one stream runs, which is cancelled afterwards.

    Args:
        url: the instance.
        stream: the stream's request, long enough for all turns; turns after its end are left out.
        loads: for each turn, requests whose KV is loaded.
        send: sends a request to the instance and waits for its answer.
        cached: returns the same request without KV transfer, for an instance that has the KV.
    """
    turns = []
    with reading(url, stream) as (tokens, reader):
        while not tokens.times and not reader.done():
            time.sleep(PERIOD_S)
        for number, bodies in enumerate(loads):
            sent = {BY_ITSELF: [], LOADS: bodies, HITS: [cached(body) for body in bodies]}
            windows = {}
            for kind in ORDERS[number % len(ORDERS)]:
                windows[kind] = run_window(sent[kind], send)
            if reader.done():
                break
            turns.append({kind: tokens.tpot_s(*window) for kind, window in windows.items()})
    return turns


def run_window(bodies: Sequence[Json], send: Callable[[Json], object]) -> tuple[float, float]:
    """Send requests, one per period, each after the answer to the previous one; returns when the
    window began and ended."""
    begin = time.perf_counter()
    for at, body in enumerate(bodies):
        wait_until(begin + at * PERIOD_S)
        send(body)
    wait_until(begin + WINDOW_S)
    return begin, time.perf_counter()


def wait_until(when: float) -> None:
    """Sleep until a time of ``time.perf_counter``, if it has not passed."""
    time.sleep(max(0.0, when - time.perf_counter()))


@contextmanager
def reading(url: str, body: Json) -> Iterator[tuple[TokenStream, Future[None]]]:
    """Read a stream on a thread, until the context ends; yields its tokens, and the thread's
    future, which is done when the stream has ended."""
    tokens, stop = TokenStream(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(read, url, body, tokens, stop)
        try:
            yield tokens, reader
        finally:
            stop.set()
        reader.result()


def read(url: str, body: Json, tokens: TokenStream, stop: threading.Event) -> None:
    """Read a stream until it ends, or until the event is set, which disconnects."""
    with closing(timed_choices(url, body | {"return_token_ids": True})) as choices:
        for now, choice in choices:
            if stop.is_set():
                return
            if token_ids := choice.get("token_ids"):
                tokens.add(now, len(token_ids))
