"""The transfer benchmark's table, JSON and plot, from synthetic results."""

from __future__ import annotations

import argparse
import json
from xml.etree import ElementTree

import numpy as np
import pytest

from mooncake_hal import bench
from mooncake_hal.bench.transfer_report import as_data, plot, table
from mooncake_hal.bench.transfer_speed import Bandwidth, Latency, TransferShape

RANGE, SMALL = TransferShape(1 << 28, 1 << 28), TransferShape(1 << 28, 4096)
FOUND = [
    Bandwidth("shm & co", "read", RANGE, 12.5, 0.1, (2.0, 4.0, 6.0)),
    Bandwidth("shm & co", "write", RANGE, 11.0, 0.2, (1.0, 1.0, 1.0)),
    Bandwidth("tcp", "read", RANGE, 6.0, 0.3, (1.0, 8.0, 3.0)),
    Bandwidth("tcp", "read", SMALL, 3.0, 0.4, (1.0, 1.0, 1.0)),
]


def test_the_table_has_a_line_per_shape_and_subject() -> None:
    lines = table(FOUND, [Latency("tcp", 4096, 15.25, 40.0)]).splitlines()
    assert lines[1].split() == ["shm", "&", "co", "1", "x", "256", "MiB", "12.50", "11.00", "0.20"]
    assert lines[3].split() == ["tcp", "65,536", "x", "4", "KiB", "3.00", "-", "0.40"]
    assert lines[4].endswith("p50 15.2 us, p99 40.0 us")


def test_data_is_json_serializable() -> None:
    data = json.loads(json.dumps(as_data(FOUND, [])))
    assert data["bandwidth"][3]["shape"] == {"total_bytes": 1 << 28, "piece_bytes": 4096}


def test_the_plot_has_a_line_per_subject() -> None:
    root = ElementTree.fromstring(plot(FOUND))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    assert len(lines[1].attrib["points"].split()) == 2


def test_speed_is_compared_round_by_round() -> None:
    assert FOUND[0].faster_than(FOUND[2]) == pytest.approx(0.5)
    assert FOUND[3].faster_than(FOUND[1]) == pytest.approx(1.0)


def test_shape_places_every_piece_once() -> None:
    spans = TransferShape(1 << 20, 4096).spans(1 << 30, 1 << 40)
    assert len(spans) == 256
    for array, base in ((spans.local, 1 << 30), (spans.remote, 1 << 40)):
        assert (np.sort(array) == base + np.arange(256, dtype=np.uint64) * np.uint64(4096)).all()


def test_invalid_arguments_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--pieces", "0"])
    assert "1 byte or more" in capsys.readouterr().err
