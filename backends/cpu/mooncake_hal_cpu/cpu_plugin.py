"""Plugin entry point of the CPU backend; imports the standard library only."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec
from mooncake_hal_cpu.cpu_info import cpu_name, this_generation

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Register the CPU backend, which ``auto`` chooses if nothing better is available."""
    return BackendSpec(name="cpu", api_version=API_VERSION, priority=0, probe=probe, load=load)


def probe() -> Availability:
    """Look for torch, without importing it, and for ``memfd_create``."""
    if find_spec("torch") is None:
        return Availability(False, "torch is not installed; install one of its builds")
    if not hasattr(os, "memfd_create"):
        return Availability(False, "it allocates KV with memfd_create, which only Linux has")
    return Availability(True, f"{cpu_name()}, {this_generation()}")


def load() -> Backend:
    """Import torch and construct the backend.

    Raises:
        BackendUnavailable: torch is installed but can't be imported. One cause: torch-npu without
            CANN breaks ``import torch`` unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
    """
    try:
        from mooncake_hal_cpu.cpu_backend import CpuBackend
    except (ImportError, OSError, RuntimeError) as exc:
        raise BackendUnavailable("cpu", f"torch can't be imported: {exc}") from exc
    return CpuBackend()
