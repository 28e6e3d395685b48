"""Entry point of the ``staged`` transport; standard library only."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec
from mooncake_hal_cuda.cuda_env import keep_kernels_in_project_cache

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

PRIORITY = 5
"""Below everything that needs no staging."""


def probe() -> Availability:
    """It runs on any host: at least one end has a GPU, the other need not."""
    if find_spec("torch") is None:
        return Availability(False, "torch is not installed")
    return Availability(True, "a GPU's memory through the host's, over tcp")


def load() -> Transport:
    """Import and construct it."""
    keep_kernels_in_project_cache()
    from mooncake_hal_cuda.transports.staged import load as load_transport

    return load_transport()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec("staged", API_VERSION, PRIORITY, probe, load, num_ports=2)
