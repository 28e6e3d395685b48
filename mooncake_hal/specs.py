"""BackendSpec and TransportSpec: what a plugin registers.

This module imports the standard library only, so that discovering plugins is cheap: a probe may
inspect the machine, but only ``load()`` may import torch or a vendor library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend
    from mooncake_hal.host_copies import HostCopies
    from mooncake_hal.known_hardware import HardwareInfo
    from mooncake_hal.port_range import ReservedPorts
    from mooncake_hal.transport import Transport

API_VERSION = 1
"""Version of the contract between mooncake_hal and its plugins."""


@dataclass(frozen=True, slots=True)
class Availability:
    """The result of a probe.

    Args:
        ok: whether ``load()`` can be expected to work.
        reason: if not ok, what is missing; otherwise what was found (may be empty).
    """

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; ``str()`` gives a line of the report that the doctor prints.

    Args:
        what: what was checked or found.
        problem: what is wrong and what to do about it; None if the check passed.
    """

    what: str
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem is None:
            return f"ok    {self.what}"
        return f"FAIL  {self.what}: {self.problem}"


def none_reserved() -> Sequence[ReservedPorts]:
    """The default of ``TransportSpec.reserved_ports``: the transport uses no library that takes
    ports of its own."""
    return ()


def no_checks() -> Sequence[Check]:
    """The default of ``TransportSpec.examine``: no checks beyond the probe."""
    return ()


@dataclass(frozen=True, slots=True)
class TransportConstraints:
    """What a transport requires of two instances that exchange KV over it. By default, nothing.

    These are properties of the transport, not of the backend: an NPU whose own links connect only
    NPUs of one generation can reach all other devices by way of host memory.

    Args:
        same_backend: whether both instances must run the same backend.
        same_generation: whether their devices must be of the same generation.
        any_tp_ratio: if False, P_tp >= D_tp and P_tp % D_tp == 0 must hold.
        variants: of an open endpoint, what it speaks: see ``Endpoint.variants``. Both ends must
            have one in common, unless one of them names none.
    """

    same_backend: bool = False
    same_generation: bool = False
    any_tp_ratio: bool = True
    variants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A compute backend that a plugin offers.

    Args:
        name: the value of ``--backend`` that selects it; lower case, unique among installed
            plugins.
        api_version: the API_VERSION that the plugin was written for.
        priority: ``auto`` selects the available backend with the highest priority, and never one
            whose priority is below zero. CPU is 0, accelerators are 90 or more.
        probe: checks the machine cheaply and without side effects; imports nothing heavy.
        load: imports and constructs the backend. Raises BackendUnavailable if the hardware turns
            out to be unusable although the probe succeeded.
        device_type: torch's name for its devices, ``"cuda"`` or ``"npu"``; empty if KV is in host
            memory.
        host_copies: for a device index, returns an object that copies between host memory and
            memory which this process's backend allocated on that device. Raises BackendUnavailable
            or DeviceError. None if transports access the backend's memory directly.
        hardware: description of the hardware, with which a deployment plan can be checked on a
            machine that lacks it; None: such a plan is rejected.
    """

    name: str
    api_version: int
    priority: int
    probe: Callable[[], Availability]
    load: Callable[[], Backend]
    device_type: str = ""
    host_copies: Callable[[int], HostCopies] | None = None
    hardware: HardwareInfo | None = None


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """A way of moving KV that a plugin offers.

    Args:
        name: the value of ``--transport`` that selects it; unique among installed plugins.
        api_version: the API_VERSION that the plugin was written for.
        priority: negotiation selects the transport with the highest priority by which both ends
            reach each other; one whose priority is below zero only if it is requested by name.
        probe: checks cheaply whether this host has what the transport needs.
        load: imports and constructs the transport.
        examine: runs detailed checks of the host for ``mooncake-hal doctor``; may run external
            tools and take seconds, but loads nothing.
        num_ports: how many TCP ports an endpoint listens on.
        reserved_ports: returns the ports that the library below the transport may take on this
            host; loads nothing. Raises HalError if a setting is invalid.
        constraints: what it requires of both ends; a pair of instances that does not satisfy them
            uses another transport.
        is_within_host: whether it connects only processes of one host, so that a deployment plan
            does not count on it between two.
    """

    name: str
    api_version: int
    priority: int
    probe: Callable[[], Availability]
    load: Callable[[], Transport]
    examine: Callable[[], Sequence[Check]] = no_checks
    num_ports: int = 1
    reserved_ports: Callable[[], Sequence[ReservedPorts]] = none_reserved
    constraints: TransportConstraints = TransportConstraints()
    is_within_host: bool = False


def installed(distributions: Sequence[str]) -> str | None:
    """Return the name and version of the first of the distributions that is installed, or None;
    imports none of them."""
    from importlib.metadata import PackageNotFoundError, version

    for name in distributions:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None
