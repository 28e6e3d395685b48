"""The probe: finds out from files and installed modules whether Ascend is usable here.

It never imports torch-npu. Without CANN that import fails, and ``import torch`` fails with it
unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch-npu 2.13 registers itself as a torch backend).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mooncake_hal.specs import Availability
from mooncake_hal_ascend import ascend_env

_CANN_FOLDERS = (
    "usr/local/Ascend/ascend-toolkit/latest",
    "usr/local/Ascend/cann",
    "usr/local/Ascend/latest",
)
_CANN_VERSION_FILES = ("version.cfg", "version.info", "compiler/version.info")
_VERSION = re.compile(r"[Vv]ersion\s*=\s*(?:\[[^:\n]*:)?(\d+\.\d+[\w.]*)")
OLDEST_CANN = (8, 5)
"""With older versions, waiting for events of the vendor's transfer engine could hang
(vllm-ascend)."""


@dataclass(frozen=True, slots=True)
class AscendMachine:
    """What the probe found on this machine.

    Args:
        device_files: names of the NPUs' device files, such as ``davinci0``.
        has_driver: whether the driver's manager, /dev/davinci_manager, exists.
        cann: folder of CANN, or None.
        has_hccn: whether /etc/hccn.conf, which lists the NPUs' network addresses, exists.
        has_torch_npu: whether torch-npu is installed.
        loads_torch_plugins: whether importing torch imports torch-npu.
        cann_version: version according to CANN's files; empty if unknown.
        torch_version, torch_npu_version: installed versions; empty if not installed.
    """

    device_files: tuple[str, ...]
    has_driver: bool
    cann: str | None
    has_hccn: bool
    has_torch_npu: bool
    loads_torch_plugins: bool
    cann_version: str = ""
    torch_version: str = ""
    torch_npu_version: str = ""


def detect_machine(root: Path | None = None) -> AscendMachine:
    """Inspect this machine.

    Args:
        root: root of its file system; by default ``ascend_env.root()``.
    """
    root = ascend_env.root() if root is None else root
    files = [path.name for path in (root / "dev").glob("davinci*")]
    cann = _find_cann(root)
    return AscendMachine(
        device_files=tuple(sorted(name for name in files if name[len("davinci") :].isdigit())),
        has_driver=(root / "dev/davinci_manager").exists(),
        cann=cann,
        has_hccn=(root / "etc/hccn.conf").exists(),
        has_torch_npu=find_spec("torch_npu") is not None,
        loads_torch_plugins=ascend_env.loads_torch_plugins(),
        cann_version=_cann_version(Path(cann)) if cann else "",
        torch_version=_installed("torch"),
        torch_npu_version=_installed("torch-npu"),
    )


def check_availability(machine: AscendMachine) -> Availability:
    """Whether Ascend is usable, and if not, everything that is missing or incompatible, the most
    basic thing first."""
    problems = [*_missing(machine), *_unfit(machine)]
    if problems:
        return Availability(False, "; ".join(problems))
    cann = f"CANN {machine.cann_version}".strip()
    return Availability(True, f"found {_devices(machine)}, and {cann} in {machine.cann}")


def _missing(machine: AscendMachine) -> list[str]:
    reasons = []
    if not machine.has_driver:
        reasons.append("no Ascend driver (/dev/davinci_manager)")
    elif not machine.device_files:
        reasons.append("the Ascend driver is installed, but there is no device (/dev/davinci0)")
    if machine.cann is None:
        reasons.append(
            "CANN is not found (ASCEND_HOME_PATH, /usr/local/Ascend); source its set_env.sh"
        )
    if not machine.has_torch_npu:
        reasons.append("torch-npu is not installed")
    elif machine.cann is None and machine.loads_torch_plugins:
        reasons.append(
            "torch-npu without CANN breaks `import torch`: "
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run the other backends"
        )
    if machine.device_files and not machine.has_hccn:
        reasons.append("/etc/hccn.conf is missing: mount it, NPUs reach each other through it")
    return reasons


def _unfit(machine: AscendMachine) -> list[str]:
    reasons = []
    torch, torch_npu = machine.torch_version, machine.torch_npu_version
    if torch and torch_npu and _numbers(torch) != _numbers(torch_npu):
        major, minor = _numbers(torch_npu)
        reasons.append(
            f"torch-npu {torch_npu} does not match torch {torch}: install torch {major}.{minor}, "
            "or torch-npu of torch's version"
        )
    found = machine.cann_version
    if found and _numbers(found) < OLDEST_CANN:
        oldest = ".".join(map(str, OLDEST_CANN))
        reasons.append(f"CANN {found} in {machine.cann} is too old: install {oldest} or newer")
    return reasons


def _numbers(text: str) -> tuple[int, int]:
    """(major, minor) of a version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _find_cann(root: Path) -> str | None:
    named = ascend_env.cann_home()
    candidates = [Path(named)] if named else [root / folder for folder in _CANN_FOLDERS]
    return next((str(path) for path in candidates if path.is_dir()), None)


def _cann_version(folder: Path) -> str:
    """The version that CANN's files contain, or an empty string."""
    for name in _CANN_VERSION_FILES:
        path = folder / name
        found = _VERSION.search(path.read_text(errors="replace")) if path.is_file() else None
        if found:
            return found[1]
    return ""


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _devices(machine: AscendMachine) -> str:
    count = len(machine.device_files)
    return f"{count} Ascend device{'s' if count > 1 else ''}"
