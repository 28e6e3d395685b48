"""Entry point. Standard library only, because every process that lists devices imports it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.known_hardware import HardwareInfo
from mooncake_hal.specs import (
    API_VERSION,
    Availability,
    BackendSpec,
    TransportConstraints,
)

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend
    from mooncake_hal.host_copies import HostCopies
    from mooncake_hal_mychip.mychip_memory import MyChipMemory

DEVICE_FILE = Path("/dev/null")  # a real chip has /dev/mychip0


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Register the chip. ``auto`` ignores negative priorities; a real chip has 90 or more."""
    return BackendSpec(
        name="mychip",
        api_version=API_VERSION,
        priority=-1,
        probe=probe,
        load=load,
        device_type="mychip",
        host_copies=load_host_copies,
        hardware=HardwareInfo(("gen1",), (16, 32, 64, 128), {"staged": TransportConstraints()}),
    )


def probe() -> Availability:
    """Check device files and installed modules, without importing or initialising anything."""
    if not DEVICE_FILE.exists():
        return Availability(False, f"no driver ({DEVICE_FILE}); install mychip-driver")
    if find_spec("torch") is None:
        return Availability(False, "torch is not installed")
    return Availability(True, "one device that is the host")


@cache
def load() -> Backend:
    """Construct the backend. Only this imports torch and the vendor's library."""
    from mooncake_hal_mychip.mychip_backend import MyChipBackend

    return MyChipBackend()


def load_host_copies(index: int) -> HostCopies:
    """Host copies of the memory that ``load()``'s backend allocates; it is one per process."""
    from mooncake_hal_mychip.mychip_memory import MyChipHostCopies

    backend = load()
    backend.runtime.bind_thread(index)  # raises if there is no such device
    return MyChipHostCopies(cast("MyChipMemory", backend.memory))
