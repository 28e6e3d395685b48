"""One device whose work is done when the call returns: streams, events and waits are trivial."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mooncake_hal.backend import DeviceInfo, Event, Graph, MemoryInfo
from mooncake_hal.errors import DeviceError
from mooncake_hal_cpu.facts import (
    cpu_name,
    memory_bytes,
    peak_resident_bytes,
    reset_peak_resident,
    this_generation,
)
from mooncake_hal_cpu.tape import record


class CpuEvent:
    """An event of a device that never lags behind its host."""

    def record(self) -> None:
        """See ``Event``."""

    def query(self) -> bool:
        """See ``Event``."""
        return True

    def synchronize(self) -> None:
        """See ``Event``."""


class CpuRuntime:
    """The machine's processors as device 0."""

    def devices(self) -> Sequence[DeviceInfo]:
        """See ``Runtime``."""
        _, total = memory_bytes()
        return (DeviceInfo(0, cpu_name(), this_generation(), total),)

    def device(self, index: int) -> torch.device:
        """See ``Runtime``."""
        require_device(index)
        return torch.device("cpu")

    def bind_thread(self, index: int) -> None:
        """See ``Runtime``."""
        require_device(index)

    def synchronize(self, index: int) -> None:
        """See ``Runtime``."""
        require_device(index)

    def memory_info(self, index: int) -> MemoryInfo:
        """See ``Runtime``."""
        require_device(index)
        return MemoryInfo(*memory_bytes())

    def reset_peak(self, index: int) -> None:
        """See ``Runtime``."""
        require_device(index)
        reset_peak_resident()

    def peak_bytes(self, index: int) -> int:
        """See ``Runtime``: this process' resident memory."""
        require_device(index)
        return peak_resident_bytes()

    def event(self, index: int) -> Event:
        """See ``Runtime``."""
        require_device(index)
        return CpuEvent()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See ``Runtime``."""
        return record(run)


def require_device(index: int) -> None:
    """Refuse every index but 0.

    Raises:
        DeviceError: the message says what there is.
    """
    if index != 0:
        raise DeviceError(f"cpu has device 0 only, device {index} was asked for")
