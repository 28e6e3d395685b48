"""Offers the null backend; imports the standard library only."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Offer the null backend, which is used only if it is requested by name."""
    return BackendSpec(name="null", api_version=API_VERSION, priority=-1, probe=probe, load=load)


def probe() -> Availability:
    """Check that torch is installed, without importing it."""
    if find_spec("torch") is None:
        return Availability(False, "torch is not installed")
    return Availability(True, "computes nothing; for tests")


def load() -> Backend:
    """Import torch and construct the backend."""
    from mooncake_hal.null.null_backend import NullBackend

    return NullBackend()
