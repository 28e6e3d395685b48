"""From records to statistics, table, JSON and page."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.latency_summary import (
    Distribution,
    LatencyTargets,
    Record,
    UnloadedLatency,
    quantile,
    summarise,
)
from mooncake_engine.replay.replay_page import page
from mooncake_engine.replay.replay_report import Report


def record(
    index: int, sent: float, pieces: list[float], end: float, error: str | None = None
) -> Record:
    return Record(index, sent - 0.5, sent, end, pieces, 100, len(pieces), 40, error)


RECORDS = [
    record(0, 10.0, [10.2, 10.3, 10.4], 10.5),
    record(1, 11.0, [11.8, 12.8], 13.0),
    record(2, 12.0, [], 14.0, "the answer stopped: <late>"),
]
REFUSED = Record(3, 13.0, 13.0, 13.0, error="status 429: too many", is_refused=True)


def test_statistics() -> None:
    summary = summarise(RECORDS, LatencyTargets(ttft_s=0.5, tbt_s=0.2))
    assert (summary.num_requests, summary.num_refused, summary.num_failed) == (3, 0, 1)
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.ttft_s.mean == pytest.approx(0.5)
    assert summary.tbt_s.max == pytest.approx(1.0)
    assert summary.e2e_s.p50 == pytest.approx(1.25)
    assert summary.late_s.max == pytest.approx(0.5)
    assert summary.requests_per_s == pytest.approx(0.5)
    assert summary.output_tokens_per_s == pytest.approx(5 / 4)
    assert summary.goodput_per_s == pytest.approx(0.25)
    assert summary.good_share == pytest.approx(1 / 3)
    assert summary.cached_share == pytest.approx(0.4)


def test_rejections_are_neither_failures_nor_goodput() -> None:
    summary = summarise([*RECORDS, REFUSED], LatencyTargets(ttft_s=0.5))
    assert (summary.num_requests, summary.num_refused, summary.num_failed) == (4, 1, 1)
    assert summary.good_share == pytest.approx(1 / 4)
    details = Report.of({}, [*RECORDS, REFUSED], LatencyTargets()).details()
    assert ("requests", "4 in 4.0 s, 1 refused, 1 failed") in details
    assert ("first refusal", "status 429: too many") in details
    assert ("first failure", "the answer stopped: <late>") in details


UNLOADED = UnloadedLatency((50, 150), (0.05, 0.15), (0.01, 0.03))


@pytest.mark.parametrize(
    ("num_input", "ttft"), [(1, 0.05), (50, 0.05), (100, 0.1), (125, 0.125), (9000, 0.15)]
)
def test_an_unloaded_request_of_any_length(num_input: int, ttft: float) -> None:
    found = Record(0, 0.0, 0.0, 2.0, [1.0], num_input)
    assert UNLOADED.ttft_times(found) == pytest.approx(1.0 / ttft)
    assert UNLOADED.tbt_times(found) is None, "one piece has no gaps"


def test_unloaded_requests_of_one_length_count_once() -> None:
    one, two = record(0, 0.0, [1.0], 1.0), record(1, 0.0, [2.0, 3.0], 3.0)
    assert UnloadedLatency.of([one, two]) == UnloadedLatency((100,), (2.0,), (1.0,))


def test_multiples_of_the_unloaded_request() -> None:
    # of 100 tokens: 0.1 s to the first token, 0.02 s between tokens; RECORDS have 0.2 and 0.8 s
    summary = summarise(RECORDS, LatencyTargets(ttft_times=4.0, unloaded=UNLOADED))
    assert summary.ttft_times is not None
    assert summary.ttft_times.max == pytest.approx(8.0)
    assert summary.tbt_times is not None
    assert summary.tbt_times.max == pytest.approx(50.0)
    assert summary.good_share == pytest.approx(1 / 3)
    assert summarise(RECORDS, LatencyTargets(tbt_times=4.0, unloaded=UNLOADED)).good_share == 0
    assert summarise(RECORDS, LatencyTargets()).ttft_times is None


def test_the_verdict_is_at_p90() -> None:
    targets = LatencyTargets(ttft_times=10.0, tbt_times=5.0, unloaded=UNLOADED)
    details = dict(Report.of({}, RECORDS, targets).details())
    assert (
        details["at P90"]
        == "TTFT 7.40 times unloaded (within 10), TBT 45.50 times unloaded (above 5)"
    )
    assert "TTFT ≤ 10 times unloaded, TBT ≤ 5 times unloaded" in details["goodput"]
    table = Report.of({}, RECORDS, targets).table()
    assert "TTFT times unloaded" in table
    assert "at P90" not in dict(Report.of({}, RECORDS, LatencyTargets()).details())


def test_the_time_between_tokens_is_that_of_the_slowest_tenth() -> None:
    times = [0.0]
    for gap in [0.1] * 18 + [1.0, 3.0]:
        times.append(times[-1] + gap)
    assert record(0, 0.0, times, 9.0).tbt_s == pytest.approx(2.0)
    assert record(0, 0.0, [1.0], 9.0).tbt_s == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_lie_among_the_values(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert ordered[0] - 1e-6 <= found <= ordered[-1] + 1e-6
    spread = Distribution.of(values)
    assert spread.p50 - 1e-6 <= spread.p90 <= spread.p99 + 1e-6 <= spread.max + 2e-6


@pytest.fixture
def report() -> Report:
    setting = {"endpoint": "http://here", "model": "<tiny>"}
    return Report.of(setting, RECORDS, LatencyTargets(ttft_s=0.5))


def test_table(report: Report) -> None:
    lines = report.table().splitlines()
    assert lines[0].split() == ["mean", "p50", "p90", "p99", "max"]
    assert lines[1].split()[:3] == ["TTFT", "ms", "500.0"]
    assert "requests: 3 in 4.0 s, 0 refused, 1 failed" in lines
    assert "goodput: 0.25 requests/s (33%) within TTFT ≤ 500 ms" in lines
    assert "first failure: the answer stopped: <late>" in lines


def test_json(report: Report) -> None:
    found = json.loads(report.json())
    assert found["summary"]["ttft_s"]["mean"] == pytest.approx(0.5)
    assert found["objective"] == {
        **{"ttft_s": 0.5, "tbt_s": None, "ttft_times": None, "tbt_times": None, "unloaded": None}
    }
    assert found["requests"][1]["ttft_s"] == pytest.approx(0.8)
    assert found["requests"][2] == {
        **{"index": 2, "sent_s": 2.0, "num_input": 100, "num_output": 0, "num_cached": 40},
        **{"ttft_s": None, "tbt_s": None, "e2e_s": None, "error": "the answer stopped: <late>"},
        **{"is_refused": False, "planned_s": 1.5, "end_s": 4.0, "piece_times_s": []},
    }


def test_a_report_can_be_read_back(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_bytes(report.json())
    again = Report.read(file)
    assert again.table() == report.table()
    assert again.setting == report.setting


@pytest.mark.parametrize("text", ["", "{}", '{"setting": {}, "objective": {}, "requests": []}'])
def test_an_invalid_report_is_rejected(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json (is not a result of|contains no requests)"):
        Report.read(file)


NUM_CHARTS = 5


def drawings(text: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(drawing)
        for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    ]


def classes(root: ElementTree.Element) -> Counter[str]:
    return Counter(mark.get("class", "") for mark in root.iter())


def test_the_page_is_self_contained(report: Report) -> None:
    text = page(report)
    assert "&lt;tiny&gt;" in text
    assert "<tiny>" not in text
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", text)
    found = drawings(text)
    assert len(found) == NUM_CHARTS + 1
    for root in found:
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for mark in root.iter():
            for name in ("x1", "x2", "cx", "x"):
                assert 0 <= float(mark.get(name, 0)) <= width
            for name in ("y1", "y2", "cy", "y"):
                assert 0 <= float(mark.get(name, 0)) <= height
    assert text.count('class="limit"') == 2


def test_axes_end_with_the_data_and_an_objective_beyond_is_named(report: Report) -> None:
    near = drawings(page(report))[0]
    far = replace(report, objective=LatencyTargets(ttft_s=60.0, tbt_s=30.0))
    ticks = [mark.text for mark in near.iter("text") if mark.get("text-anchor") == "middle"]
    ttft, tbt, _, as_sent, _, _ = drawings(page(far))
    assert [m.text for m in ttft.iter("text") if m.get("text-anchor") == "middle"] == ticks
    for root, unit in ((ttft, "60000 ms"), (as_sent, "60000 ms"), (tbt, "30000 ms")):
        [outside] = [mark for mark in root.iter("text") if mark.get("class") == "outside"]
        assert outside.text == f"objective {unit}: beyond the axis"
        assert classes(root)["limit"] == 0


def test_a_timeline_has_a_row_per_request(report: Report) -> None:
    timeline = drawings(page(report))[-1]
    found = classes(timeline)
    assert (found["bar-wait"], found["bar-answer"], found["bar-failed"]) == (2, 2, 1)
    rows = {mark.get("y") for mark in timeline.iter("rect")}
    assert len(rows) == 3
    assert "the answer stopped: <late>" in [
        m.text.split(": ", 1)[1] for m in timeline.iter("title") if m.text
    ]


def test_a_long_timeline_shows_some_of_its_requests() -> None:
    many = [record(i, float(i), [i + 0.5], i + 1.0) for i in range(1000)]
    text = page(Report.of({}, many, LatencyTargets()))
    assert "Requests, every 7th" in text
    assert classes(drawings(text)[-1])["bar-wait"] == 143


def test_two_runs_are_side_by_side(report: Report) -> None:
    slower = Report.of({"model": "other"}, [record(0, 5.0, [9.0, 9.5], 10.0)], LatencyTargets())
    text = page(report, slower)
    assert text.count("<section>") == 2
    assert "<dd>other</dd>" in text
    found = drawings(text)
    assert len(found) == NUM_CHARTS + 2
    for root in found[:NUM_CHARTS]:
        kinds = classes(root)
        assert kinds["line"] + (kinds["dot"] > 0) == 1
        assert kinds["line earlier"] + (kinds["dot earlier"] > 0) == 1
    ours, theirs = found[-2:]
    assert [m.text for m in ours.iter("text")] == [m.text for m in theirs.iter("text")]


def test_a_page_of_one_answer_without_gaps() -> None:
    only = Report.of({}, [record(0, 1.0, [1.0], 1.0)], LatencyTargets())
    assert len(drawings(page(only))) == NUM_CHARTS + 1
