"""The part of ``make test-cuda-compile`` that is short enough for every test run.

It runs in processes of its own: interpretation is chosen when kernels are imported, and the
compiler is Triton's for a device that is not present.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")

ROOT = Path(__file__).resolve().parents[3]
EVERYDAY = {
    # every kernel in every dtype; other layouts, sizes and head counts are left out
    "tests/emulated/cuda/test_ops.py": (
        "(layouts and BHLPT) or (write_kv and BHLPT) or 14to2 or nobody or scores or strided "
        "or one_token or company or blocks_are or same or test_float16 or widths "
        "or (norm and 250-7) or (rope and 7-40) or (silu_mul and 250-7) or (moe and 7-chosen1) "
        "or temperature or (draws and 0.05 and 0.9) or (scaled and (BHLPT or not attention))"
    ),
    "tests/emulated/cuda/test_sharing.py": "test",
    # every kind of memory shared between processes
    "tests/emulated/cuda/test_ipc.py": (
        "one_range or odd_sizes or any_order or test_between_processes "
        "or (TestFabric and (domain or host)) or revoked_while or peer_access or a_part"
    ),
    "tests/emulated/cuda/test_staged.py": (
        "(TestStaged and not Hosts) and (one_range or odd_sizes or any_order)"
    ),
    "tests/emulated/cuda/test_kv_transfer.py": "BHLPT and ranks0",
    "tests/emulated/cuda/test_engine.py": (
        "cuda-to-cpu-pulled-llama or (two_ranks and cuda-to-cpu-pushed)"
    ),
    "tests/compiled/cuda/test_compiled.py": (
        "sm_90 and (bfloat16-blocks16 or spans or drawing or (narrow and bfloat16))"
    ),
}
_PASSED = re.compile(r"(\d+) passed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", EVERYDAY, ids=lambda path: Path(path).stem)
def test_kernels(path: str) -> None:
    """All selected tests pass, and at least one is selected."""
    interprets = "1" if "emulated" in path else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-x", path, "-k", EVERYDAY[path]]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": interprets, "PYTHONPATH": "tests"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    passed = _PASSED.search(run.stdout)
    assert passed is not None, run.stdout
    assert "skipped" not in run.stdout, run.stdout
