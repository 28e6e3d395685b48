"""BackendSpec and TransportSpec: what a plugin registers.

Everything here is standard library only, so that discovering plugins costs nothing: a probe may
look at the machine, only ``load()`` may import torch or a vendor library.
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
    """A probe's answer.

    Args:
        ok: whether ``load()`` can be expected to work.
        reason: if not ok, what is missing; if ok, what was found (may be empty).
    """

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked; as text, a line of the report that the doctor prints.

    Args:
        what: was checked, found, or wanted.
        problem: None if it is in order; else what is wrong, and what to do.
    """

    what: str
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem is None:
            return f"ok    {self.what}"
        return f"FAIL  {self.what}: {self.problem}"


def none_reserved() -> Sequence[ReservedPorts]:
    """Ports that are taken below a transport which has nothing below it: none."""
    return ()


def no_checks() -> Sequence[Check]:
    """What a plugin has to say of a host beyond its probe: nothing."""
    return ()


@dataclass(frozen=True, slots=True)
class TransportConstraints:
    """What a transport asks of the two instances between which it moves KV. Nothing, by default.

    They are the transport's and not the backend's: an NPU whose own links know only NPUs of one
    generation reaches everything else by way of the host's memory.

    Args:
        same_backend: whether both must run the same backend.
        same_generation: whether their devices must be of one generation.
        any_tp_ratio: if False, only P_tp >= D_tp and P_tp % D_tp == 0.
    """

    same_backend: bool = False
    same_generation: bool = False
    any_tp_ratio: bool = True


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A compute backend that a plugin offers.

    Args:
        name: what ``--backend`` takes; lower case, unique among installed plugins.
        api_version: the API_VERSION that the plugin was written for.
        priority: ``auto`` takes the highest one that is available; below zero means that
            ``auto`` never takes it. CPU is 0, accelerators are 90 or more.
        probe: cheap, side-effect-free look at the machine; imports nothing heavy.
        load: import and construct the backend. Raises BackendUnavailable when the probe was
            too hopeful.
        device_type: what torch calls its devices, ``"cuda"`` or ``"npu"``; empty where KV lies in
            the host's own memory.
        host_copies: takes a device's index; copies between that device's memory and the host's,
            for memory that this process's backend allocated. Raises BackendUnavailable or
            DeviceError. None where transports reach the memory themselves.
        hardware: for plans that are checked where it is not; None: such a plan is refused.
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
        name: what ``--transport`` takes; unique among installed plugins.
        api_version: the API_VERSION that the plugin was written for.
        priority: negotiation takes the highest one that both ends reach each other by; one below
            zero only if it was named.
        probe: cheap look at what this host has.
        load: import and construct the transport.
        examine: looks at the host one thing after the other, for ``mooncake-hal doctor``; may run
            tools and take seconds, and loads nothing.
        num_ports: TCP ports that an endpoint of it listens on.
        reserved_ports: says which others whatever it is built on may take on this host; loads
            nothing. Raises HalError where a setting makes no sense.
        constraints: what it asks of both ends; a pair that does not meet them takes another one.
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


def installed(distributions: Sequence[str]) -> str | None:
    """Return the first of the distributions that is installed, with its version; imports none."""
    from importlib.metadata import PackageNotFoundError, version

    for name in distributions:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None
