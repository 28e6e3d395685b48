"""Entry point of the Ascend backend; standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec
from mooncake_hal_ascend.machine import diagnose, look

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Offer Ascend NPUs."""
    return BackendSpec(name="ascend", api_version=API_VERSION, priority=90, probe=probe, load=load)


def probe() -> Availability:
    """Look for devices, driver, CANN and torch-npu; loads none of them."""
    return diagnose(look())


def load() -> Backend:
    """Refuse, with what the probe found.

    Raises:
        BackendUnavailable: always, in this version.
    """
    raise BackendUnavailable("ascend", probe().reason)
