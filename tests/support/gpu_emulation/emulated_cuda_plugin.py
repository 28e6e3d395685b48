"""Offers the emulated GPU as backend ``cuda`` to processes of their own.

Requires this folder and ``tests`` on PYTHONPATH, TRITON_INTERPRET=1, and MOONCAKE_HAL_BLOCK=cuda,
which disables the plugin for real GPUs; see ``support.emulated_devices``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend
    from mooncake_hal.host_copies import HostCopies


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Offer the device."""
    return BackendSpec(
        name="cuda",
        api_version=API_VERSION,
        priority=100,
        probe=lambda: Availability(True, "emulated"),
        load=load,
        device_type="cuda",
        host_copies=load_host_copies,
    )


def load() -> Backend:
    """Load the backend; EMULATED_CUDA_KERNELS=interpreted runs the GPU's kernels, slowly."""
    from support.cuda_emulation import device_without_kernels, emulated_backend

    if os.environ.get("EMULATED_CUDA_KERNELS") == "interpreted":
        return emulated_backend()
    return device_without_kernels()


def load_host_copies(index: int) -> HostCopies:
    """Copies between the emulated device and the host."""
    from support.cuda_emulation import emulated_host_copies

    return emulated_host_copies(index)
