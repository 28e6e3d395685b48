"""The five distributions move in lock step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_all_versions_and_pins_agree() -> None:
    script = ROOT / "ci/set-version.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "package",
    ["mooncake_hal", "mooncake_proxy", "mooncake_engine", "mooncake_hal_cuda", "mooncake_hal_cpu"],
)
def test_importing_is_free(package: str) -> None:
    code = (
        f"import {package}, sys, threading; "
        "assert 'torch' not in sys.modules, 'torch'; "
        "assert 'transformers' not in sys.modules, 'transformers'; "
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
