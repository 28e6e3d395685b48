"""The tool that measures streams over HTTP on a device, run with a tiny model on the CPU
backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import uvloop
from support.served_streams import (
    STREAMS,
    Served,
    StreamTimes,
    first_token_ms,
    request_of,
    run_streams,
)
from support.speed_models import TINY, written_checkpoint
from support.streaming_client import StreamReader, stream_each


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(TINY, written_checkpoint(TINY, "cpu", tmp_path_factory.mktemp("models")), "cpu")


@pytest.fixture(scope="module")
def port(served: Served) -> Iterator[int]:
    with served.instance("--threads", "1") as port:
        yield port


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_streams_have_all_their_tokens(port: int, sampling: str) -> None:
    times = run_streams(port, TINY, 32, sampling)
    assert times.rate > 0
    assert len(times.first_ms) == 32
    # a token may be part of a character, which is sent with the next one
    wanted = 32 * (TINY.length(STREAMS[32][1]) - 1)
    assert 0.9 * wanted <= len(times.gaps_ms) <= wanted
    assert min(times.first_ms) > 0


def test_first_token_of_single_request(port: int) -> None:
    assert first_token_ms(port, TINY) > 0


def test_rejected_request_reports_reason(port: int) -> None:
    request = request_of(TINY, 8, 4, "greedy") | {"temperature": -1}
    with pytest.raises(ConnectionError, match=r"HTTP/1.1 400 .*"):
        uvloop.run(stream_each(port, [request]))


def test_pair_serves_through_proxy(served: Served) -> None:
    with served.pair("pull") as port:
        times = run_streams(port, TINY, 1, "greedy")
    assert times.rate > 0


async def readers_of(*stamps: list[float]) -> list[StreamReader]:
    readers = [StreamReader(b"") for _ in stamps]
    for reader, times in zip(readers, stamps, strict=True):
        reader.began, reader.times = 1.0, times
    return readers


def test_stream_times_as_metrics() -> None:
    readers = uvloop.run(readers_of([1.5, 2.0, 2.5, 3.0], [2.0, 2.5, 3.0, 3.5]))
    times = StreamTimes.of(readers)
    assert times.rate == 4.0  # both streams, between 2 and 3 s
    assert times.first_ms == (500.0, 1000.0)
    figure = times.figure("two streams", 3.0, "more")
    assert figure.holds
    assert figure.context == "TTFT p50 / p99 750.0 / 995.0 ms, ITL 500.0 / 500.0 ms; more"


def test_streams_that_never_all_overlap_count_from_first_request() -> None:
    times = StreamTimes.of(uvloop.run(readers_of([1.5, 2.0], [2.5, 3.0])))
    assert times.rate == 2.0
    assert str(times).startswith("never all at once, TTFT ")
