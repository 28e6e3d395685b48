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
from _pytest.mark.expression import Expression

pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")

ROOT = Path(__file__).resolve().parents[3]
EVERYDAY = {
    # every kernel in every dtype; other layouts, sizes and head counts are left out
    "attention": (
        "tests/emulated/cuda/test_ops.py",
        *("layouts and BHLPT", "write_kv and BHLPT", "scaled and (BHLPT or not attention)"),
        *("14to2", "scores", "strided", "one_token", "blocks_are"),
    ),
    "ops": (
        "tests/emulated/cuda/test_ops.py",
        *("same and not several", "several_splits_give and 1-1", "splits_of_latents and 1"),
        *("test_float16", "widths", "empty_batch", "sequence_does_not_depend_on_others"),
        *("norm and 250-7", "rope and 7-40", "silu_mul and 250-7", "moe and 7-chosen1"),
        *("temperature", "filters and 0.05 and 0.9"),
    ),
    "sharing": ("tests/emulated/cuda/test_sharing.py", "test"),
    # every kind of memory shared between processes
    "ipc": (
        "tests/emulated/cuda/test_ipc.py",
        *("one_range", "odd_sizes", "any_order", "test_between_processes", "revoked_while"),
        *("TestFabric and domain", "TestFabric and host", "peer_access", "a_part"),
    ),
    "staged": (
        "tests/emulated/cuda/test_staged.py",
        "TestStaged and not Hosts and one_range",
        "TestStaged and not Hosts and odd_sizes",
        "TestStaged and not Hosts and any_order",
    ),
    "kv transfer": ("tests/emulated/cuda/test_kv_transfer.py", "BHLPT and ranks0"),
    "engine": (
        "tests/emulated/cuda/test_engine.py",
        "cuda-to-cpu-pulled-llama",
        "two_ranks and cuda-to-cpu-pushed",
    ),
    "compiled": (
        "tests/compiled/cuda/test_compiled.py",
        "sm_90 and bfloat16-blocks16",
        "sm_90 and spans",
        "sm_90 and sampling",
        "sm_90 and narrow and bfloat16",
    ),
}
"""Files of tests with expressions for ``-k``; a test that matches one of them is run."""
_PASSED = re.compile(r"^PASSED (.+)$", re.MULTILINE)


def selects(expression: str, test: str) -> bool:
    """Whether ``-k`` selects a test, as far as its node id tells."""
    words = Expression.compile(expression)
    return words.evaluate(lambda word, **_: word.lower() in test.lower())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", EVERYDAY)
def test_kernels(part: str) -> None:
    """All selected tests pass, and every expression selects one: tests are renamed at times."""
    path, *expressions = EVERYDAY[part]
    interprets = "1" if "emulated" in path else "0"
    selection = " or ".join(f"({expression})" for expression in expressions)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rp", path, "-k", selection]
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
    passed = _PASSED.findall(run.stdout)
    unused = [each for each in expressions if not any(selects(each, test) for test in passed)]
    assert not unused, f"{unused} select no test: {run.stdout}"
    assert "skipped" not in run.stdout, run.stdout
