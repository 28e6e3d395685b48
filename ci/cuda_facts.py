"""Prints one line about this machine's CUDA devices and libraries, as the heading of a table.

python ci/cuda_facts.py

Exits 1 and prints the reason if CUDA can't be used.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from mooncake_hal.errors import HalError
from mooncake_hal.registry import Registry
from mooncake_hal_cuda.cuda_machine import detect_machine

HINT = (
    "torch's build is what ci/install found first: rm -rf .venv, set PIP_INDEX_URL to the index "
    "that torch's installation page names for the driver's CUDA, and PIP_EXTRA_INDEX_URL to PyPI's"
)


def main() -> int:
    """Print it."""
    try:
        devices = Registry.discover().select_backend("cuda").runtime.devices()
    except HalError as exc:
        print(f"{exc} ({HINT})" if "torch" in str(exc) else exc)
        return 1
    import torch

    first = devices[0]
    driver = ".".join(map(str, detect_machine().driver_version or ("unknown",)))
    packages = ", ".join(filter(None, map(described, ("triton", "flashinfer-python"))))
    print(
        f"{len(devices)} x {first.name} ({first.generation}, {first.total_bytes / 1e9:.0f} GB), "
        f"driver {driver}, torch {torch.__version__} (CUDA {torch.version.cuda}), {packages}"
    )
    return 0


def described(package: str) -> str:
    """A package's name and version; empty if it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
