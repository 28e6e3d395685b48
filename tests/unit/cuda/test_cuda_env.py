"""The directory of Triton's kernel cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_hal_cuda.cuda_env import keep_kernels_in_project_cache

ROOT = Path(__file__).parents[3]
COMPILE = """
from support.cuda_compiler import compiling
from support.cuda_shapes import copy_pieces
from mooncake_hal_cuda.cuda_env import keep_kernels_in_project_cache
keep_kernels_in_project_cache()
with compiling("sm_90") as kernels:
    copy_pieces(aligned=True)
print(kernels[0].name)
"""


def test_kernels_are_cached_beside_our_own_helpers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # restored afterwards
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_kernels_in_project_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mooncake-hal" / "native" / "triton")


def test_cache_directory_set_by_the_operator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_kernels_in_project_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_kernel_compiles_without_a_home_directory(tmp_path: Path) -> None:
    """As in a container whose user has no home, and whose root is read-only."""
    pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")
    environment = os.environ | {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"PYTHONPATH": "tests", "TRITON_INTERPRET": "0"}
    environment.pop("TRITON_CACHE_DIR", None)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.stdout.strip() == "copy_spans", run.stderr
    assert any((tmp_path / "mooncake-hal" / "native" / "triton").iterdir())


AS_THE_IMAGE = """
mount -o remount,bind,ro / && mount -t tmpfs tmpfs "$1" && mkdir "$TMPDIR" || exit 77
shift
exec unshare --user --map-user="$1" --map-group="$1" "${@:2}"
"""
"""The image's file system under compose and Kubernetes: read-only except for its cache and a
directory for temporary files, which is not /tmp here because the checkout may lie there."""


def test_kernel_compiles_as_the_images_user_on_a_read_only_root() -> None:
    """With the user and the cache directory of ``Dockerfile.cuda``."""
    pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile.cuda").read_text()
    [cache] = re.findall(r"XDG_CACHE_HOME=(\S+)", dockerfile)
    [user] = re.findall(r"^USER (\d+):\d+$", dockerfile, re.MULTILINE)
    names = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"HOME": "/nonexistent", "XDG_CACHE_HOME": cache, "PYTHONPATH": "tests"}
    environment["TMPDIR"] = str(Path(cache).with_name("temporary"))
    compile_it = "import os; print(os.getuid(), os.access('.', os.W_OK))\n" + COMPILE
    command = ["unshare", "--mount", "bash", "-c", AS_THE_IMAGE, "bash", str(Path(cache).parent)]
    run = subprocess.run(
        [*command, user, sys.executable, "-B", "-c", compile_it],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if run.returncode == 77 or "unshare failed" in run.stderr:
        pytest.skip(f"no namespaces with mounts of their own here: {run.stderr.strip()}")
    assert run.stdout.split() == [user, "False", "copy_spans"], run.stderr
