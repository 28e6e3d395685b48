"""Plugin entry point of the Ascend backend; imports the standard library only."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.known_hardware import ASCEND
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec
from mooncake_hal_ascend.ascend_machine import check_availability, detect_machine

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend
    from mooncake_hal.host_copies import HostCopies
    from mooncake_hal_ascend.ascend_backend import AscendMemory


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Register the backend for Ascend NPUs."""
    return BackendSpec(
        name="ascend",
        api_version=API_VERSION,
        priority=90,
        probe=probe,
        load=load,
        device_type="npu",
        host_copies=load_host_copies,
        hardware=ASCEND,
    )


def probe() -> Availability:
    """Look for devices, driver, CANN and torch-npu, and load none of them."""
    return check_availability(detect_machine())


def load() -> Backend:
    """Import torch-npu and construct the backend, once per process.

    All callers get the same object, because transports look up memory that the engine's backend
    has allocated, in order to scatter received data over it.

    Raises:
        BackendUnavailable: something is missing, whether the probe detects it or not.
    """
    found = probe()
    if not found.ok:  # importing torch-npu without CANN would report less, or break torch
        raise BackendUnavailable("ascend", found.reason)
    return _construct()


def load_host_copies(index: int) -> HostCopies:
    """Copy between host memory and the memory that the backend of ``load()`` allocates.

    Raises:
        BackendUnavailable: see ``load``.
        DeviceError: there is no such NPU.
    """
    backend = load()
    device = backend.runtime.device(index)
    from mooncake_hal_ascend.ascend_runtime import NpuSideStream
    from mooncake_hal_ascend.npu_host_copies import NpuHostCopies

    memory = cast("AscendMemory", backend.memory)
    return NpuHostCopies(memory.allocation_around, device, NpuSideStream())


@cache
def _construct() -> Backend:
    try:
        from mooncake_hal_ascend.ascend_backend import AscendBackend
    except (ImportError, OSError, RuntimeError) as exc:
        raise BackendUnavailable("ascend", f"torch-npu can't be imported: {exc}") from exc
    return AscendBackend()
