"""Events come out whole and unchanged, wherever the network cuts them."""

from __future__ import annotations

from itertools import pairwise

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
def test_any_cut_gives_the_same_events(events: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(events)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    framer = sse.EventFramer()
    blocks = [framer.feed(whole[a:b]) for a, b in pairwise(edges)]
    assert b"".join(blocks) == whole
    assert framer.tail == b""
    assert [event for block in blocks for event, _ in sse.split_events(block)] == events


def test_the_beginning_of_an_event_waits() -> None:
    framer = sse.EventFramer()
    assert framer.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert framer.tail == b"data: 2\n"


def test_data_lines_are_joined_and_comments_skipped() -> None:
    assert sse.event_data(b": hi\nevent: x\ndata: a\ndata:b\n\n") == b"a\nb"


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10)
    with pytest.raises(sse.EventTooLong, match="no event end in 11 bytes"):
        sse.EventFramer().feed(b"data: 12345")
