"""Entry point of the CUDA backend; standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec
from mooncake_hal_cuda.machine import diagnose, look

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Offer NVIDIA GPUs."""
    return BackendSpec(name="cuda", api_version=API_VERSION, priority=100, probe=probe, load=load)


def probe() -> Availability:
    """Look for the driver, the devices and a torch that can use them; initialises none of them."""
    return diagnose(look())


def load() -> Backend:
    """Refuse, with what the probe found.

    Raises:
        BackendUnavailable: always, in this version.
    """
    raise BackendUnavailable("cuda", probe().reason)
