"""The part of ``make test-cuda-compile`` that every run of the tests has time for.

Both run in processes of their own: interpretation is chosen when kernels are imported, and the
compiler is Triton's for a device that is not there.
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
    # every kernel and dtype; left out: what takes longest, and other head counts and sizes
    "tests/emulated/cuda/test_ops.py": (
        "layouts or nobody or strided or scores or block or write_kv or moe or company "
        "or rope or float16 or (rms_norm and 64) or (silu_mul and 250) "
        "or 14to2 or (head_dims and 80)",
        "mla_block_sizes or (mla_layouts and LPBTH) or linear",
    ),
    "tests/emulated/cuda/test_ipc.py": ("ranges or one_range or odd_sizes or any_order", "65536"),
    "tests/compiled/cuda/test_compiled.py": (
        "sm_90 and (bfloat16-blocks16 or spans or drawing)",
        "never",
    ),
}
_PASSED = re.compile(r"(\d+) passed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", EVERYDAY, ids=lambda path: Path(path).stem)
def test_kernels(path: str) -> None:
    """All that is selected passes, and something is."""
    wanted, unwanted = EVERYDAY[path]
    interprets = "1" if "emulated" in path else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-x", path, "-k"]
    run = subprocess.run(
        [*command, f"({wanted}) and not ({unwanted})"],
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
