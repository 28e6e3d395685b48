"""TPOT beside loads: tokens are counted as they arrive, windows are compared within their turn, and
the stream ends with the measurement."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.deploy import load_script

pace = load_script("vllm_pace")


def test_tokens_that_arrive_together_are_counted() -> None:
    tokens = pace.TokenStream()
    for now, num_tokens in ((1.0, 1), (2.0, 1), (3.0, 3), (4.0, 1), (9.0, 1)):
        tokens.add(now, num_tokens)
    assert tokens.tpot_s(1.5, 4.5) == pytest.approx(2 / 4)
    assert tokens.tpot_s(0.0, 9.0) == pytest.approx(8 / 6)


def test_window_in_which_the_stream_stood_still_is_a_gap_as_long_as_it() -> None:
    tokens = pace.TokenStream()
    for now in (1.0, 2.0, 9.0):
        tokens.add(now, 1)
    assert tokens.tpot_s(5.0, 9.0) == 4.0
    assert tokens.tpot_s(4.5, 7.5) == 3.0


def test_windows_are_compared_within_their_turn() -> None:
    speeds = [1.0 + number for number in range(24)]  # a host that slows down all the time
    turns = [{pace.BY_ITSELF: each, pace.LOADS: 1.02 * each, pace.HITS: each} for each in speeds]
    found = pace.ratio_of(turns, pace.LOADS, pace.BY_ITSELF)
    assert (found.median, found.low, found.high) == pytest.approx((1.02, 1.02, 1.02))
    assert str(found) == "1.020 (1.02-1.02)"


def test_interval_has_the_middle_ranks_of_the_turns() -> None:
    turns = [{pace.BY_ITSELF: 1.0, pace.LOADS: 1 + each / 100} for each in range(24)]
    found = pace.ratio_of(turns, pace.LOADS, pace.BY_ITSELF)
    assert (found.median, found.low, found.high) == pytest.approx((1.115, 1.08, 1.15))
    found = pace.ratio_of(turns[:1], pace.LOADS, pace.BY_ITSELF)
    assert (found.median, found.low, found.high) == (1.0, 1.0, 1.0)


class _Instance(BaseHTTPRequestHandler):
    """Streams tokens until the client leaves, or for ``num_tokens``."""

    num_tokens = 1 << 30
    was_left: threading.Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["return_token_ids"] is True
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(self.num_tokens):
                line = {"choices": [{"text": "a", "token_ids": [7]}]}
                self.wfile.write(b"data: " + json.dumps(line).encode() + b"\n\n")
                time.sleep(0.0005)
        except OSError:
            self.was_left.set()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def instance(**attributes: Any) -> Iterator[tuple[str, threading.Event]]:
    was_left = threading.Event()
    handler = type("Handler", (_Instance,), {"was_left": was_left, **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", was_left
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WINDOW_S", 0.05)
    monkeypatch.setattr(pace, "PERIOD_S", 0.01)


@pytest.mark.usefixtures("_short_windows")
def test_each_turn_has_all_windows_and_the_stream_ends_with_them() -> None:
    sent: list[str] = []
    loads = [[{"name": f"load {turn}"}] for turn in range(4)]
    with instance() as (url, was_left):
        turns = pace.measure_turns(
            url,
            {"stream": True},
            loads,
            lambda body: sent.append(body["name"]),
            lambda body: {"name": body["name"].replace("load", "hit")},
        )
        assert was_left.wait(20)
    assert sent == [f"{what} {turn}" for turn in range(4) for what in ("load", "hit")]
    assert [turn.keys() for turn in turns] == [{pace.BY_ITSELF, pace.LOADS, pace.HITS}] * 4
    assert all(tpot > 0 for turn in turns for tpot in turn.values())


@pytest.mark.usefixtures("_short_windows")
def test_turns_after_the_end_of_the_stream_are_left_out() -> None:
    with instance(num_tokens=20) as (url, _):
        assert pace.measure_turns(url, {}, [[], []], lambda body: body, lambda body: body) == []


@pytest.mark.usefixtures("_short_windows")
def test_stream_that_fails_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        pace.measure_turns("http://127.0.0.1:9", {}, [[]], lambda body: body, lambda body: body)
