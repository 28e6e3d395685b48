"""A test that ends its worker fails once, and all others are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAST = "def test_one(): pass\ndef test_two(): os._exit(3)\n"
FIRST = "def test_one(): os._exit(3)\ndef test_two(): pass\n"
NONE = "def test_one(): pass\ndef test_two(): pass\n"
CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"


@pytest.mark.parametrize("deadly", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("num_others", [0, 3])
def test_test_that_kills_its_worker_fails_alone(
    deadly: str, num_others: int, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for number, tests in enumerate([deadly, *[NONE] * num_others]):
        (tmp_path / f"test_{number}.py").write_text(f"import os\n{tests}")
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "xdist",
        "-n",
        "2",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(CONFTEST.parent),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to import than this takes to run
    }
    done = subprocess.run(
        [*argv, "-p", "xdist", "-n", "2", "--dist", "loadfile", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert f"1 failed, {1 + 2 * num_others} passed" in done.stdout, done.stdout
