"""Offers ``hccs``, where an Ascend machine has a transfer engine. Standard library only."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec
from mooncake_hal.transports.adapter.probing import installed
from mooncake_hal_ascend import plugin as backend

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

NAME = "hccs"

PRIORITY = 60
"""Above what goes through a host's NIC or memory."""

DISTRIBUTIONS = {
    "mooncake": ("mooncake-transfer-engine-npu",),
    "memfabric_hybrid": ("memfabric-hybrid", "memfabric_hybrid"),
}
"""Which packages bring a module that the transport can use."""


def probe() -> Availability:
    """Look for NPUs as the backend does, then for an engine; whether one loads is seen later."""
    machine = backend.probe()
    if not machine.ok:
        return machine
    found = [
        name
        for module, names in DISTRIBUTIONS.items()
        if importlib.util.find_spec(module) is not None and (name := installed(names)) is not None
    ]
    if not found:
        return Availability(
            False,
            "no transfer engine is installed: pip install mooncake-transfer-engine-npu, or "
            "memfabric-hybrid",
        )
    return Availability(True, f"{', '.join(found)}; {machine.reason}")


def load() -> Transport:
    """Load the backend and the engines.

    Raises:
        TransportUnavailable: the backend does not load, or no engine does.
    """
    from mooncake_hal_ascend.hccs.transport import load as load_hccs

    return load_hccs()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer NPU memory to NPU memory."""
    return TransportSpec(NAME, API_VERSION, PRIORITY, probe, load)
