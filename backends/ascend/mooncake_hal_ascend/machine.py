"""What this machine has for Ascend, read from files and by looking for modules.

torch-npu is never imported here: without CANN its import fails, and takes ``import torch`` with it
unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch-npu 2.13 registers itself as a torch backend).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mooncake_hal.specs import Availability
from mooncake_hal_ascend import env

_CANN_FOLDERS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that the probe reasons about.

    Args:
        device_files: names of the NPUs' device files, such as ``davinci0``.
        has_driver: whether the driver's manager, /dev/davinci_manager, is there.
        cann: folder of CANN, or None.
        has_hccn: whether /etc/hccn.conf, the NPUs' network addresses, is there.
        has_torch_npu: whether torch-npu is installed.
        loads_torch_plugins: whether importing torch imports torch-npu.
    """

    device_files: tuple[str, ...]
    has_driver: bool
    cann: str | None
    has_hccn: bool
    has_torch_npu: bool
    loads_torch_plugins: bool


def look(root: Path = Path("/")) -> Machine:
    """Read the facts of this machine.

    Args:
        root: where its file system begins.
    """
    files = [path.name for path in (root / "dev").glob("davinci*")]
    return Machine(
        device_files=tuple(sorted(name for name in files if name[len("davinci") :].isdigit())),
        has_driver=(root / "dev/davinci_manager").exists(),
        cann=_find_cann(root),
        has_hccn=(root / "etc/hccn.conf").exists(),
        has_torch_npu=find_spec("torch_npu") is not None,
        loads_torch_plugins=env.loads_torch_plugins(),
    )


def diagnose(machine: Machine) -> Availability:
    """Say everything that is missing, the most basic thing first."""
    missing = list(_missing(machine))
    if missing:
        return Availability(False, "; ".join(missing))
    return Availability(
        False,
        f"found {_devices(machine)} and CANN in {machine.cann}, but this version of "
        "mooncake-hal-ascend has no kernels yet",
    )


def _missing(machine: Machine) -> list[str]:
    reasons = []
    if not machine.has_driver:
        reasons.append("no Ascend driver (/dev/davinci_manager)")
    elif not machine.device_files:
        reasons.append("the Ascend driver is there, but there is no device (/dev/davinci0)")
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


def _find_cann(root: Path) -> str | None:
    named = env.cann_home()
    candidates = [Path(named)] if named else [root / folder for folder in _CANN_FOLDERS]
    return next((str(path) for path in candidates if path.is_dir()), None)


def _devices(machine: Machine) -> str:
    count = len(machine.device_files)
    return f"{count} Ascend device{'s' if count > 1 else ''}"
