"""The probe: finds out from files whether CUDA is usable here, since ``cuInit`` would break CUDA in
forked children."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mooncake_hal.specs import Availability
from mooncake_hal_cuda.cuda_env import hides_all_devices

OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest driver for each major version of CUDA (CUDA Toolkit release notes, table 2). On GPUs
for data centres an older one suffices, too, with that version's forward-compatibility package,
whose libcuda.so.1 is newer than the kernel's part of the driver."""

OLDEST_TRITON = (3, 5)
"""The kernels use features that older versions lack (``disable_licm`` of ``tl.range``). torch 2.9
comes with this version."""

_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+)\.(\d+)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?P<value>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CudaMachine:
    """What the probe found on this machine.

    Args:
        has_driver: whether the driver's library, libcuda.so.1, loads.
        driver_cuda: version of CUDA up to which that library works; None if unknown.
        driver_version: first two numbers of the kernel driver's version; None if unknown.
        device_files: names of the GPUs' device files, such as ``nvidia0``; in WSL ``dxg``, one for
            all.
        models: names of the GPUs as the driver reports them; may be empty in a container.
        has_torch: whether torch is installed.
        torch_cuda: CUDA version that torch was built for, or None.
        has_triton: whether triton is installed.
        hides_devices: whether CUDA_VISIBLE_DEVICES hides all GPUs.
        denied_files: those of ``device_files`` that this process may not open.
        triton_version: first two numbers of triton's version; None if unknown.
    """

    has_driver: bool
    driver_cuda: tuple[int, int] | None
    driver_version: tuple[int, int] | None
    device_files: tuple[str, ...]
    models: tuple[str, ...]
    has_torch: bool
    torch_cuda: str | None
    has_triton: bool
    hides_devices: bool
    denied_files: tuple[str, ...]
    triton_version: tuple[int, int] | None = None


def detect_machine(root: Path = Path("/")) -> CudaMachine:
    """Inspect this machine.

    Args:
        root: root of its file system.
    """
    paths = sorted((root / "dev").glob("nvidia*"))
    files = [path for path in paths if path.name[len("nvidia") :].isdigit()]
    files += (root / "dev").glob("dxg")
    reports = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    torch = find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    has_driver, driver_cuda = read_driver_library()
    return CudaMachine(
        has_driver=has_driver,
        driver_cuda=driver_cuda,
        driver_version=_read_driver_version(root / "proc/driver/nvidia/version"),
        device_files=tuple(path.name for path in files),
        models=tuple(model for path in reports if (model := parse_model(path.read_text()))),
        has_torch=torch is not None,
        torch_cuda=parse_torch_cuda(version.read_text()) if version else None,
        has_triton=find_spec("triton") is not None,
        hides_devices=hides_all_devices(),
        denied_files=tuple(p.name for p in files if not os.access(p, os.R_OK | os.W_OK)),
        triton_version=_read_triton_version(),
    )


def check_availability(machine: CudaMachine) -> Availability:
    """Whether CUDA is usable, and if not, the most basic thing that is missing."""
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
            False,
            "the NVIDIA driver is installed, but there is no device (/dev/nvidia0, or /dev/dxg)",
        )
    found = _devices(machine)
    missing = _missing_software(machine)
    return Availability(not missing, f"{found}, but {missing}" if missing else found)


def _missing_software(machine: CudaMachine) -> str:
    """What is missing to use the devices, or an empty string."""
    if machine.denied_files == machine.device_files:
        return (
            f"this process may not open /dev/{machine.denied_files[0]}: join the group that may "
            "(ls -l /dev/nvidia0), or have the container given the device"
        )
    if machine.hides_devices:
        return "CUDA_VISIBLE_DEVICES hides them all; unset it, or name some"
    if not machine.has_torch:
        return "torch is not installed"
    if machine.torch_cuda is None:
        return "torch is built without CUDA; install a CUDA build"
    if reason := _driver_problem(machine, machine.torch_cuda):
        return reason
    if not machine.has_triton:
        return "triton is not installed; torch's CUDA builds bring the version that fits"
    if machine.triton_version and machine.triton_version < OLDEST_TRITON:
        found, wanted = _dotted(machine.triton_version), _dotted(OLDEST_TRITON)
        return f"triton {found} is too old: {wanted} or newer is needed, as torch 2.9 brings it"
    return ""


def _driver_problem(machine: CudaMachine, torch_cuda: str) -> str:
    """Why the driver does not work with torch, or an empty string."""
    major = int(torch_cuda.split(".")[0])
    if machine.driver_cuda is None or machine.driver_cuda >= (major, 0):
        return ""
    version, oldest = machine.driver_version, OLDEST_DRIVERS.get(major)
    found = f"driver {_dotted(version)}" if version else "the driver"
    wanted = f"{_dotted(oldest)} or newer" if oldest else "a newer one"
    return (
        f"{found} (CUDA {_dotted(machine.driver_cuda)}) is too old for torch's CUDA {torch_cuda}: "
        f"install {wanted}, cuda-compat-{torch_cuda.replace('.', '-')} on a GPU for data centres, "
        "or a torch that is built for an older CUDA"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def parse_driver_version(text: str) -> tuple[int, int] | None:
    """First two numbers of the driver's version in /proc/driver/nvidia/version, or None."""
    found = _DRIVER_VERSION.search(text)
    return (int(found[1]), int(found[2])) if found else None


def parse_torch_cuda(text: str) -> str | None:
    """CUDA version in torch's version.py, or None for a build without CUDA."""
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


def _devices(machine: CudaMachine) -> str:
    count = len(machine.device_files)
    named = f" ({machine.models[0]})" if machine.models else ""
    return f"found {count} NVIDIA device{'s' if count > 1 else ''}{named}"


def read_driver_library(name: str = "libcuda.so.1") -> tuple[bool, tuple[int, int] | None]:
    """Whether the driver's library loads, and the version of CUDA that it reports, which needs no
    ``cuInit``."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return False, None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return True, None
    return True, (version.value // 1000, version.value % 1000 // 10)


def _read_triton_version() -> tuple[int, int] | None:
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


def _read_driver_version(path: Path) -> tuple[int, int] | None:
    try:
        return parse_driver_version(path.read_text())
    except OSError:
        return None
