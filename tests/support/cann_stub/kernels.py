"""Kernels for the real torch-npu: the CPU's for aten ops, plain torch for its own ops."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch
import yaml

SOURCE = Path(__file__).with_name("overlay.cpp")
REFERENCES = Path(__file__).parents[1] / "npu_emulation/torch_npu/kernels"
TIMEOUT_S = 600

COMPUTED = frozenset(
    f"aten::{name}"
    for name in (
        "clone",
        "contiguous",
        "copy_",
        "isnan",
        "full",
        "full.out",
        "tril_indices",
        "triu_indices",
    )
)
"""Ops for creating, viewing and copying tensors that torch-npu implements itself, but with
operators from CANN."""


def compile_overlay(folder: Path) -> Path:
    """Compile the library against the installed torch, once."""
    root = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = folder / f"overlay-{torch.__version__}-{digest}.so"
    if target.exists():
        return target
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    links = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w"]
    partial = target.with_suffix(".partial")
    command = ["g++", *flags, *includes, str(SOURCE), "-o", str(partial), *links]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    partial.replace(target)
    return target


SKIPPED_MODULES = ("__init__", "registry", "formats", "distributed_experts")
"""Modules of the emulation that have no kernels for this; the last one needs groups that only the
emulated device has."""


def take_over(folder: Path) -> int:
    """Register the CPU's kernels for aten ops on the NPU; returns how many."""
    import torch_npu

    torch.ops.load_library(str(compile_overlay(folder)))
    table = Path(torch_npu.__file__).parent / "csrc/aten/npu_native_functions.yaml"
    listed = yaml.safe_load(table.read_text())["supported"]
    names = {f"aten::{entry if isinstance(entry, str) else entry['func']}" for entry in listed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about existing kernels
        return int(torch.ops.cann_stub.take_over(sorted(names - COMPUTED)))


def use_references() -> None:
    """Register the emulated NPU's reference kernels for torch-npu's own ops; see ``registry``."""
    from support.cann_stub import registry

    package = ModuleType("torch_npu.kernels")
    package.__path__ = [str(REFERENCES)]
    sys.modules["torch_npu.kernels"] = package
    sys.modules["torch_npu.kernels.registry"] = registry
    for path in sorted(REFERENCES.glob("*.py")):
        if path.stem not in SKIPPED_MODULES:
            importlib.import_module(f"torch_npu.kernels.{path.stem}")
