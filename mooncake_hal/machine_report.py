"""``mooncake-hal collect-env``: the facts about a machine and its software that a bug report
needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Facts = dict[str, str]

PACKAGES = (
    *("torch", "torch-npu", "triton", "triton-ascend", "flashinfer-python", "transformers"),
    *("tokenizers", "safetensors", "gguf", "huggingface-hub", "llguidance", "msgspec", "numpy"),
    *("pyzmq", "uvicorn", "starlette", "uvloop", "httptools", "ray", "vllm", "vllm-ascend"),
    *("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
    *("mooncake-transfer-engine-npu", "memfabric-hybrid", "nixl"),
)
_PREFIXES = (
    *(
        "MOONCAKE_",
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "ASCEND_",
        "HCCL_",
        "GLOO_",
        "OMP_",
        "KMP_",
        "MKL_",
    ),
    *("TORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "RAY_", "UCX_", "LD_"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PROXY", "proxy")
_TOOLS: Mapping[str, tuple[str, ...]] = {
    "nvidia-smi": (
        "--query-gpu=index,name,driver_version,memory.total,pcie.bus_id",
        "--format=csv",
    ),
    "npu-smi": ("info",),
    "ibv_devinfo": (),
    "g++": ("--version",),
}
_TOOL_TIMEOUT_S = 10.0
_MAX_TOOL_LINES = 60


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The collected facts, by section.

    Args:
        sections: names and values by section title.
    """

    sections: dict[str, Facts] = field(default_factory=dict)

    def text(self) -> str:
        """The report as text to paste into an issue."""
        parts = []
        for title, facts in self.sections.items():
            parts.append(f"## {title}")
            for name, value in facts.items():
                first, *rest = value.splitlines() or [""]
                parts += [f"{name}: {first}".rstrip(), *(f"    {line}" for line in rest)]
            parts.append("")
        return "\n".join(parts)


def machine_report(root: Path = Path("/")) -> MachineReport:
    """Collect the facts about this machine. Changes nothing, resets no device, and leaves secrets
    out.

    Args:
        root: directory below which ``/proc``, ``/sys`` and ``/dev`` are read.
    """
    return MachineReport(
        {
            "System": _system(root),
            "Packages": _packages(),
            "Memory and limits": _limits(root),
            "RDMA": _rdma(root / "sys/class/infiniband"),
            "Network interfaces": _interfaces(root / "sys/class/net"),
            "Environment": _environment(os.environ),
            "Tools": _tools(),
        }
    )


def _system(root: Path) -> Facts:
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:  # there is no such file
        system = platform.system()
    return {
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "os": system,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _value_in(root / "proc/cpuinfo", "model name"),
        "cpus": f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}",
        "numa nodes": str(len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        "libc": " ".join(platform.libc_ver()),
        "container": "yes" if _is_container(root) else "not detected",
    }


def _is_container(root: Path) -> bool:
    return (root / ".dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ


def _packages() -> Facts:
    installed = {
        distribution.name: distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name is not None
    }
    ours = sorted(name for name in installed if name.startswith("mooncake-"))
    names = [*ours, *(name for name in PACKAGES if name in installed and name not in ours)]
    return {name: installed[name] for name in names}


def _limits(root: Path) -> Facts:
    meminfo, shm = root / "proc/meminfo", root / "dev/shm"
    facts = {
        "memory": _value_in(meminfo, "MemTotal"),
        "available": _value_in(meminfo, "MemAvailable"),
        "swap": _value_in(meminfo, "SwapTotal"),
        "huge pages": _value_in(meminfo, "HugePages_Total"),
        "/dev/shm": _gib(lambda: shutil.disk_usage(shm).free, "free"),
        "/tmp": _gib(lambda: shutil.disk_usage(root / "tmp").free, "free"),
    }
    for name, number in (
        ("open files", resource.RLIMIT_NOFILE),
        ("locked memory", resource.RLIMIT_MEMLOCK),
        ("processes", resource.RLIMIT_NPROC),
        ("core file", resource.RLIMIT_CORE),
    ):
        soft, hard = resource.getrlimit(number)
        facts[name] = f"{_limit(soft)} (at most {_limit(hard)})"
    group = root / "sys/fs/cgroup"
    for name in ("memory.max", "cpu.max"):
        if (value := _read(group / name)) is not None:
            facts[f"cgroup {name}"] = value
    return facts


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _gib(measure: Callable[[], int], what: str) -> str:
    try:
        return f"{measure() / (1 << 30):.1f} GiB {what}"
    except OSError as exc:
        return f"unknown: {exc.strerror}"


def _rdma(devices: Path) -> Facts:
    facts: Facts = {}
    for port in sorted(devices.glob("*/ports/*")):
        names = ("state", "rate", "link_layer")
        shown = ", ".join(found for name in names if (found := _read(port / name)))
        gids = sum(_read(gid) not in (None, "", _NO_GID) for gid in (port / "gids").glob("*"))
        firmware = _read(devices / port.parts[-3] / "fw_ver") or "unknown"
        facts[f"{port.parts[-3]} port {port.name}"] = f"{shown}, {gids} GIDs, firmware {firmware}"
    return facts or {"devices": "none"}


_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def _interfaces(devices: Path) -> Facts:
    facts = {}
    for device in sorted(devices.glob("*")):
        speed = _read(device / "speed")
        shown = f"{_read(device / 'operstate')}, MTU {_read(device / 'mtu')}"
        facts[device.name] = shown + (f", {speed} Mbit/s" if speed and speed != "-1" else "")
    return {"host": socket.gethostname(), **facts}


def _environment(environment: Mapping[str, str]) -> Facts:
    """The environment variables that may influence our processes. The values of secrets, and of
    addresses that may contain one, are replaced by "(set)"."""
    return {
        name: "(set)" if any(word in name for word in _SECRET_WORDS) else value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES)
    }


def _tools() -> Facts:
    """Output of the vendors' tools, if they are installed."""
    facts = {}
    for name, arguments in _TOOLS.items():
        if (path := shutil.which(name)) is None:
            facts[name] = "not installed"
            continue
        try:
            ran = subprocess.run(
                [path, *arguments], capture_output=True, timeout=_TOOL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            facts[name] = f"failed: {exc}"
            continue
        said = (ran.stdout or ran.stderr).decode(errors="replace").strip().splitlines()
        head = [] if ran.returncode == 0 else [f"exited with status {ran.returncode}"]
        facts[name] = "\n".join([*head, *said[:_MAX_TOOL_LINES]])
    return facts


def _value_in(path: Path, name: str) -> str:
    """The value of a ``name: value`` line in a file such as /proc/meminfo."""
    for line in (_read(path) or "").splitlines():
        key, sign, value = line.partition(":")
        if sign and key.strip() == name:
            return value.strip()
    return "unknown"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # the file does not exist, or belongs to a port that is down
        return None
