"""Where Triton keeps what it compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_hal_cuda.cuda_env import keep_kernels_in_project_cache

COMPILE = """
from support.cuda_compiler import compiling
from support.cuda_shapes import copy_pieces
from mooncake_hal_cuda.cuda_env import keep_kernels_in_project_cache
keep_kernels_in_project_cache()
with compiling("sm_90") as kernels:
    copy_pieces(aligned=True)
print(kernels[0].name)
"""


def test_kernels_are_kept_beside_our_own_helpers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # restored afterwards
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_kernels_in_project_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mooncake-hal" / "native" / "triton")


def test_a_folder_that_the_operator_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_kernels_in_project_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_a_kernel_is_compiled_without_a_home(tmp_path: Path) -> None:
    """As in a container whose user has none, and whose root can't be written."""
    pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")
    environment = os.environ | {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"PYTHONPATH": "tests", "TRITON_INTERPRET": "0"}
    environment.pop("TRITON_CACHE_DIR", None)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.stdout.strip() == "copy_spans", run.stderr
    assert any((tmp_path / "mooncake-hal" / "native" / "triton").iterdir())
