"""``mooncake-hal bench transfer`` over real transports, with little memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mooncake_hal import bench


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(list(arguments)))


def test_two_transports_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, drawing = tmp_path / "found.json", tmp_path / "found.svg"
    status = run(
        *("--transports", "shm,tcp", "--size", "2", "--pieces", "4096", "--rounds", "2"),
        *("--json", str(data), "--plot", str(drawing)),
    )
    assert status == 0
    table = capsys.readouterr().out
    for line in ("memcpy, 2 threads", "shm", "tcp", "512 x 4 KiB", "one read of 4096 bytes"):
        assert line in table
    found = json.loads(data.read_text())
    assert {item["subject"] for item in found["latency"]} == {"shm", "tcp"}
    assert len(found["bandwidth"]) == 3 * 2 * 2
    assert all(item["gb_per_s"] > 0 for item in found["bandwidth"])
    assert ElementTree.fromstring(drawing.read_text()).tag.endswith("svg")


def test_unavailable_transport_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--transports", "warp", "--size", "1", "--pieces", "4096", "--rounds", "1") == 1
    assert "warp is not measured" in capsys.readouterr().err
