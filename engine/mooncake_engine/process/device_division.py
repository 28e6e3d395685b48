"""Which devices the instances of a local deployment take, and how much memory of them.

An instance alone takes the devices from ``--device`` on, and most of their memory. Two with the
same options would take the same: the second one finds no memory, and other devices stay idle.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_engine.errors import ConfigError
from mooncake_hal.registry import Registry

SHARED_UTILIZATION = 0.9
"""Of a device's memory, for all instances on it together."""
_COUNT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What one instance takes.

    Args:
        first: index of its first device; its ranks are on that and those behind it.
        num_instances: that are on these devices, this one included.
    """

    first: int
    num_instances: int = 1

    @property
    def memory_utilization(self) -> float:
        """Of each of its devices' memory."""
        return int(SHARED_UTILIZATION / self.num_instances * 1000) / 1000


def divide_devices(num_devices: int, num_ranks: Sequence[int]) -> list[DeviceShare]:
    """Devices of their own for all instances as long as there are any, else the same in turn.

    Args:
        num_devices: of this host.
        num_ranks: of each instance.

    Raises:
        ConfigError: an instance has more ranks than there are devices.
    """
    firsts: list[int] = []
    users = [0] * num_devices
    following = 0
    for ranks in num_ranks:
        if ranks > num_devices:
            raise ConfigError(
                f"an instance of {ranks} ranks needs {ranks} devices, and this host shows "
                f"{num_devices}: lower --dp-size, --tp-size or --pp-size"
            )
        first = following if following + ranks <= num_devices else 0
        following = first + ranks
        firsts.append(first)
        for index in range(first, first + ranks):
            users[index] += 1
    return [
        DeviceShare(first, max(users[first : first + ranks]))
        for first, ranks in zip(firsts, num_ranks, strict=True)
    ]


def count_devices(backend: str) -> int:
    """How many devices this host has for a backend; 0 where it computes itself.

    They are counted in a process of its own: a driver that has begun here would be in the way of
    none of the children, but its memory would stay.

    Args:
        backend: as ``--backend`` has it.

    Raises:
        ConfigError: they can't be counted.
    """
    registry = Registry.discover()
    if not registry.device_type(backend):
        return 0
    name = registry.backend_name(backend)
    argv = [sys.executable, "-m", "mooncake_hal", "devices", "--json"]
    try:
        counted = subprocess.run(
            argv, capture_output=True, timeout=_COUNT_TIMEOUT_S, check=True, text=True
        )
        devices = json.loads(counted.stdout)["devices"]
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise ConfigError(f"the devices of this host can't be counted: {exc}") from exc
    return sum(device["backend"] == name for device in devices)


@dataclass(frozen=True, slots=True)
class InstanceNeeds:
    """What an instance of a deployment asks for.

    Args:
        backend: as ``--backend`` has it.
        num_ranks: of its own.
        has_device: whether its options say which devices.
        has_memory: whether its options say how much memory is for KV.
    """

    backend: str
    num_ranks: int
    has_device: bool = False
    has_memory: bool = False


def device_options(
    instances: Sequence[InstanceNeeds], count: Callable[[str], int] = count_devices
) -> list[tuple[str, ...]]:
    """What to add to each instance's options: its devices and, where others have the same ones,
    its part of their memory. Where one says itself which devices it takes, nothing is divided.

    Args:
        instances: in the order in which they start.
        count: ``count_devices``.

    Raises:
        ConfigError: there are not enough devices for an instance, or they can't be counted.
    """
    options: list[tuple[str, ...]] = [()] * len(instances)
    if any(instance.has_device for instance in instances):
        return options
    for backend in dict.fromkeys(instance.backend for instance in instances):
        alike = [i for i, instance in enumerate(instances) if instance.backend == backend]
        num_devices = count(backend)
        if not num_devices:
            continue
        shares = divide_devices(num_devices, [instances[i].num_ranks for i in alike])
        for i, share in zip(alike, shares, strict=True):
            words = ["--device", str(share.first)]
            if share.num_instances > 1 and not instances[i].has_memory:
                words += ["--memory-utilization", f"{share.memory_utilization:g}"]
            options[i] = tuple(words)
    return options
