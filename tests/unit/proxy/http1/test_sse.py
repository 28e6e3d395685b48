"""SSE events are parsed complete and unchanged, wherever packets split them."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given, strategies as st

from mooncake_proxy.http1 import sse

EVENTS = st.lists(
    st.sampled_from(
        [
            b'data: {"a":1}\n\n',
            b"data: [DONE]\n\n",
            b": ping\n\n",
            b"event: x\r\ndata: 1\r\ndata: 2\r\n\r\n",
            "data: ä\n\n".encode(),
        ]
    ),
    max_size=8,
)


@given(EVENTS, st.lists(st.integers(0, 300), max_size=12))
def test_any_split_gives_same_events(events: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(events)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    framer = sse.EventFramer()
    blocks = [framer.feed(whole[a:b]) for a, b in pairwise(edges)]
    assert b"".join(blocks) == whole
    assert framer.tail == b""
    assert [event for block in blocks for event, _ in sse.split_events(block)] == events


def test_partial_event_is_buffered() -> None:
    framer = sse.EventFramer()
    assert framer.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert framer.tail == b"data: 2\n"


def test_data_lines_are_joined_and_comments_skipped() -> None:
    assert sse.event_data(b": hi\nevent: x\ndata: a\ndata:b\n\n") == b"a\nb"


def test_oversized_event_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10)
    with pytest.raises(sse.EventTooLong, match="no event end in 11 bytes"):
        sse.EventFramer().feed(b"data: 12345")


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n"])
def test_parse_time_is_linear_in_number_of_events(end: bytes) -> None:
    """Sixteen times the events take about sixteen times as long, not its square."""
    small = (b"data: {}" + end) * 2_000

    def seconds(block: bytes) -> float:
        begin = process_time()
        for _ in sse.split_events(block):
            pass
        return process_time() - begin

    once = min(seconds(small) for _ in range(5))
    assert min(seconds(small * 16) for _ in range(3)) < 64 * once
