"""Offers the paced backend; imports the standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.null.null_plugin import probe
from mooncake_hal.specs import API_VERSION, BackendSpec

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Offer the paced backend, which is used only if it is requested by name."""
    return BackendSpec(name="paced", api_version=API_VERSION, priority=-1, probe=probe, load=load)


def load() -> Backend:
    """Import torch and construct the backend."""
    from mooncake_hal.null.paced_backend import PacedBackend

    return PacedBackend()
