"""Compiles the emulated device against the installed torch, once per version of both."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).parents[4] / ".cache" / "npu-emulation"
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
TIMEOUT_S = 600


def library() -> Path:
    """The compiled device; raises RuntimeError with the compiler's output if it does not build."""
    CACHE.mkdir(parents=True, exist_ok=True)
    built = CACHE / f"emulation-{_key()}.so"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    return built


def _key() -> str:
    texts = [path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join([torch.__version__, *FLAGS, *texts]).encode()).hexdigest()[:16]


def _compile(built: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the emulated NPU needs a C++ compiler (c++ or g++) on PATH")
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    partial = built.with_suffix(".partial")
    command = [compiler, *FLAGS, *includes, str(SOURCES / "emulation.cpp"), "-o", str(partial)]
    done = subprocess.run([*command, *libraries], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated NPU does not compile:\n{done.stderr[-4000:]}")
    partial.replace(built)
