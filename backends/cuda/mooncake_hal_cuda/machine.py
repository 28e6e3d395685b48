"""What this machine has for CUDA, read from files: ``cuInit`` in a parent breaks its forks."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mooncake_hal.specs import Availability

_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?P<value>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that the probe reasons about.

    Args:
        has_driver: whether the driver's library, libcuda.so.1, loads.
        device_files: names of the GPUs' device files, such as ``nvidia0``.
        models: names of the GPUs as the driver gives them; may be empty in a container.
        has_torch: whether torch is installed.
        torch_cuda: CUDA version that torch was built for, or None.
    """

    has_driver: bool
    device_files: tuple[str, ...]
    models: tuple[str, ...]
    has_torch: bool
    torch_cuda: str | None


def look(root: Path = Path("/")) -> Machine:
    """Read the facts of this machine.

    Args:
        root: where its file system begins.
    """
    files = [path.name for path in (root / "dev").glob("nvidia*")]
    reports = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    torch = find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    return Machine(
        has_driver=_has_driver(),
        device_files=tuple(sorted(name for name in files if name[len("nvidia") :].isdigit())),
        models=tuple(model for path in reports if (model := parse_model(path.read_text()))),
        has_torch=torch is not None,
        torch_cuda=parse_torch_cuda(version.read_text()) if version else None,
    )


def diagnose(machine: Machine) -> Availability:
    """Say what is missing, the most basic thing first."""
    if not machine.has_driver and not machine.device_files:
        return Availability(False, "no NVIDIA driver: libcuda.so.1 is not found")
    if not machine.has_driver:
        return Availability(
            False,
            f"{_devices(machine)}, but libcuda.so.1 is not found; install the driver's libraries, "
            "or start the container with the NVIDIA runtime",
        )
    if not machine.device_files:
        return Availability(
            False, "the NVIDIA driver is installed, but there is no device (/dev/nvidia0)"
        )
    if not machine.has_torch:
        return Availability(False, f"{_devices(machine)}, but torch is not installed")
    if machine.torch_cuda is None:
        return Availability(
            False, f"{_devices(machine)}, but torch is built without CUDA; install a CUDA build"
        )
    return Availability(
        False, f"{_devices(machine)}, but this version of mooncake-hal-cuda has no kernels yet"
    )


def parse_torch_cuda(text: str) -> str | None:
    """CUDA version in torch's version.py, or None for a build without."""
    found = _TORCH_CUDA.search(text)
    value = found["value"].strip() if found else "None"
    return None if value == "None" else value.strip("'\"")


def parse_model(text: str) -> str | None:
    """GPU name in a file of /proc/driver/nvidia/gpus, or None."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return None


def _devices(machine: Machine) -> str:
    count = len(machine.device_files)
    named = f" ({machine.models[0]})" if machine.models else ""
    return f"found {count} NVIDIA device{'s' if count > 1 else ''}{named}"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
