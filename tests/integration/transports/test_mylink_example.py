"""The example transport: installed as a plugin, listed, and passing the conformance suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "mylink"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with the example installed: its folder, and the metadata that pip would
    write."""
    noted = tmp_path / "mylink-0.1.0.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: mylink\nVersion: 0.1.0\n")
    (noted / "entry_points.txt").write_text("[mooncake_hal]\nmylink = mylink.mylink_plugin\n")
    assert 'mylink = "mylink.mylink_plugin"' in (EXAMPLE / "pyproject.toml").read_text()
    path = os.pathsep.join([str(tmp_path), str(EXAMPLE)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> str:
    """Standard output of a Python module, which must exit with 0."""
    program = [sys.executable, "-m", *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example_is_listed(environment: dict[str, str]) -> None:
    lines = run(environment, "mooncake_hal", "devices").splitlines()
    [line] = [line for line in lines if line.split()[:1] == ["mylink"]]
    assert line.split(None, 3)[1:] == ["available", "-1", "every process of this host"]


@pytest.mark.timeout(240)
def test_example_passes_conformance_suite(environment: dict[str, str]) -> None:
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    output = run(environment, "pytest", *options, str(EXAMPLE / "tests"))
    assert int(output.split(" passed")[0].split()[-1]) > 40, output


def test_example_stays_small() -> None:
    [source] = (EXAMPLE / "mylink").glob("*_transport.py")
    assert len(source.read_text().splitlines()) <= 150
