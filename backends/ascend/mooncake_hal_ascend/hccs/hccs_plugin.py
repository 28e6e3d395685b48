"""Offers ``hccs``, where an Ascend machine has a transfer engine. Standard library only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import (
    API_VERSION,
    Availability,
    Check,
    TransportConstraints,
    TransportSpec,
    installed,
)
from mooncake_hal_ascend import ascend_env, ascend_plugin
from mooncake_hal_ascend.ascend_machine import look

if TYPE_CHECKING:
    from mooncake_hal.port_range import ReservedPorts
    from mooncake_hal.transport import Transport

NAME = "hccs"

PRIORITY = 60
"""Above what goes through a host's NIC or memory."""
CONSTRAINTS = TransportConstraints(same_backend=True, same_generation=True, any_tp_ratio=False)
"""The vendor's links join NPUs of one generation, and its engines move whole heads of a rank to one
rank."""

DISTRIBUTIONS = {
    "mooncake": ("mooncake-transfer-engine-npu",),
    "memfabric_hybrid": ("memfabric-hybrid", "memfabric_hybrid"),
}
"""Which packages bring a module that the transport can use."""


ENGINES = {"mooncake": "mooncake", "memfabric_hybrid": "memfabric"}
"""What the transport calls the engine of a module."""


def probe() -> Availability:
    """Look for NPUs as the backend does, then for an engine; whether one loads is seen later."""
    machine = ascend_plugin.probe()
    if not machine.ok:
        return machine
    found = _installed()
    if not found:
        return Availability(
            False,
            "no transfer engine is installed: pip install mooncake-transfer-engine-npu, or "
            "memfabric-hybrid",
        )
    return Availability(True, f"{', '.join(found.values())}; {machine.reason}")


def load() -> Transport:
    """Load the backend and the engines.

    Raises:
        TransportUnavailable: the backend does not load, or no engine does.
    """
    from mooncake_hal_ascend.hccs.hccs_transport import load as load_hccs

    return load_hccs()


def examine() -> Sequence[Check]:
    """Look at this host's NPUs, settings, ports and tools."""
    from mooncake_hal_ascend.hccs.hccs_checks import examine as examine_host

    return examine_host(
        _devices(), ascend_env.engine_settings(), ascend_env.transport_settings(), ascend_env.root()
    )


def reserved_ports() -> Sequence[ReservedPorts]:
    """The ports that engines may take on this host, in any of its processes, for its NPUs.

    Raises:
        HalError: a variable that sets them makes no sense.
    """
    from mooncake_hal_ascend.hccs.hccs_settings import engine_ports, settings_of_endpoint

    wanted = settings_of_endpoint({}, ascend_env.transport_settings()).engine
    engines = (ENGINES[module] for module in _installed()) if wanted == "auto" else (wanted,)
    said, devices = ascend_env.engine_settings(), _devices() or [0]
    return [each for engine in engines for each in engine_ports(engine, said, devices)]


def _devices() -> list[int]:
    """Physical numbers of this host's NPUs."""
    return sorted(int(name.removeprefix("davinci")) for name in look().device_files)


def _installed() -> dict[str, str]:
    """The engines' modules that are here, and of which distribution."""
    return {
        module: name
        for module, names in DISTRIBUTIONS.items()
        if importlib.util.find_spec(module) is not None and (name := installed(names)) is not None
    }


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer NPU memory to NPU memory."""
    return TransportSpec(
        NAME,
        API_VERSION,
        PRIORITY,
        probe,
        load,
        examine,
        reserved_ports=reserved_ports,
        constraints=CONSTRAINTS,
    )
