"""Plugin entry point of the ``hccs`` transport; imports the standard library only."""

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
from mooncake_hal_ascend.ascend_machine import detect_machine

if TYPE_CHECKING:
    from mooncake_hal.port_range import ReservedPorts
    from mooncake_hal.transport import Transport

NAME = "hccs"

PRIORITY = 60
"""Above the transports that go through a host's NIC or memory."""
CONSTRAINTS = TransportConstraints(same_backend=True, same_generation=True, any_tp_ratio=False)
"""The vendor's links connect NPUs of one generation only, and its engines move whole heads of one
rank to one rank."""

DISTRIBUTIONS = {
    "mooncake": ("mooncake-transfer-engine-npu",),
    "memfabric_hybrid": ("memfabric-hybrid", "memfabric_hybrid"),
}
"""Names of the packages that contain each engine's module."""


ENGINES = {"mooncake": "mooncake", "memfabric_hybrid": "memfabric"}
"""The transport's name of each module's engine."""


def probe() -> Availability:
    """Look for NPUs as the backend does, then for an installed engine, without loading it."""
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
    """Load the backend and construct the transport.

    Raises:
        TransportUnavailable: the backend does not load.
    """
    from mooncake_hal_ascend.hccs.hccs_transport import load as load_hccs

    return load_hccs()


def examine() -> Sequence[Check]:
    """Check this host's NPUs, settings, ports and tools."""
    from mooncake_hal_ascend.hccs.hccs_checks import examine as examine_host

    return examine_host(
        _devices(), ascend_env.engine_settings(), ascend_env.transport_settings(), ascend_env.root()
    )


def reserved_ports() -> Sequence[ReservedPorts]:
    """The ports that engines may use on this host, in any process, for its NPUs.

    Raises:
        HalError: a variable that configures them is invalid.
    """
    from mooncake_hal_ascend.hccs.hccs_settings import engine_ports, settings_of_endpoint

    wanted = settings_of_endpoint({}, ascend_env.transport_settings()).engine
    engines = (ENGINES[module] for module in _installed()) if wanted == "auto" else (wanted,)
    said, devices = ascend_env.engine_settings(), _devices() or [0]
    return [each for engine in engines for each in engine_ports(engine, said, devices)]


def _devices() -> list[int]:
    """Physical numbers of this host's NPUs."""
    return sorted(int(name.removeprefix("davinci")) for name in detect_machine().device_files)


def _installed() -> dict[str, str]:
    """The installed engines: module name to distribution."""
    return {
        module: name
        for module, names in DISTRIBUTIONS.items()
        if importlib.util.find_spec(module) is not None and (name := installed(names)) is not None
    }


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Register the transport that moves memory between NPUs."""
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
