"""Divides a host's devices, and their memory, among the instances of a local deployment.

A single instance uses the devices from ``--device`` on, and most of their memory. Two instances
with the same options would use the same devices: the second one would find no free memory, while
other devices stay idle.
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
"""Fraction of a device's memory that all instances on it use together."""
_COUNT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The devices of one instance.

    Args:
        first: index of its first device; its ranks use that one and those after it.
        num_instances: maximum number of instances on one of these devices, this one included.
    """

    first: int
    num_instances: int = 1

    @property
    def memory_utilization(self) -> float:
        """Fraction of each device's memory that the instance may use."""
        return int(SHARED_UTILIZATION / self.num_instances * 1000) / 1000


def divide_devices(num_devices: int, num_ranks: Sequence[int]) -> list[DeviceShare]:
    """Assigns devices to instances: separate ones while there are any, then shared ones, in turn.

    Args:
        num_devices: number of devices on this host.
        num_ranks: number of ranks of each instance.

    Raises:
        ConfigError: an instance has more ranks than the host has devices.
    """
    firsts: list[int] = []
    users = [0] * num_devices
    following = 0
    for ranks in num_ranks:
        if ranks > num_devices:
            raise ConfigError(
                f"an instance of {ranks} ranks needs {ranks} devices, but this host has "
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
    """Returns the number of devices of a backend on this host; 0 for a CPU backend.

    They are counted in a separate process. Initialising the driver in this one would not disturb
    the children, but would keep its memory.

    Args:
        backend: value of ``--backend``.

    Raises:
        ConfigError: the devices can't be counted.
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
    """An instance's requirements.

    Args:
        backend: value of ``--backend``.
        num_ranks: number of its ranks.
        has_device: whether its options choose the devices.
        has_memory: whether its options set the memory for KV.
    """

    backend: str
    num_ranks: int
    has_device: bool = False
    has_memory: bool = False


def device_options(
    instances: Sequence[InstanceNeeds], count: Callable[[str], int] = count_devices
) -> list[tuple[str, ...]]:
    """Returns the options to add to each instance: its devices and, if it shares them with other
    instances, its fraction of their memory. If the options of any instance choose devices, nothing
    is divided.

    Args:
        instances: the instances, in the order of their start.
        count: counts a backend's devices; see ``count_devices``.

    Raises:
        ConfigError: an instance needs more devices than there are, or they can't be counted.
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
