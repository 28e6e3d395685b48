"""The scripts of the hardware legs, run on this host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.deploy import ROOT


@pytest.mark.parametrize(
    ("command", "devices", "words"),
    [
        ("ci/test-cuda", "nvidia[0-9]*", "skipped: no CUDA device"),
        ("ci/test-ascend A2", "davinci[0-9]*", "skipped: no Ascend A2"),
        ("ci/test-ascend A3", "davinci[0-9]*", "skipped: no Ascend A3"),
        ("ci/test-python 3.99", "no such device", "skipped: no python3.99"),
    ],
)
def test_leg_without_hardware_fails_with_reason(command: str, devices: str, words: str) -> None:
    if any(Path("/dev").glob(devices)):
        pytest.skip(f"this machine has the hardware of {command}")
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(words)
    assert done.returncode == 77


def test_unknown_generation_is_rejected() -> None:
    done = subprocess.run(
        ["ci/test-ascend", "A9"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "A2|A3" in done.stderr
