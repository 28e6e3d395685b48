"""A process's peak device memory excludes what other processes had allocated before."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mooncake_hal.accelerator import AcceleratorRuntime
from mooncake_hal.backend import DeviceInfo

TOTAL = 1000


@dataclass
class Device:
    """A stand-in for torch's module of one device type, which has no graphs."""

    others: int = 0
    context: int = 0
    reserved: int = 0
    most_reserved: int = 0

    def set_device(self, _: torch.device) -> None:
        self.context = 50

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return TOTAL - self.others - self.context - self.reserved, TOTAL

    def memory_reserved(self, _: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, _: torch.device) -> int:
        return self.most_reserved


def bound(module: Device) -> AcceleratorRuntime:
    """The device's runtime, to which a thread is bound."""
    runtime = AcceleratorRuntime(
        "emulated", module, "cuda", "VISIBLE", [DeviceInfo(0, "emulated", "sm_90", TOTAL)]
    )
    runtime.bind_thread(0)
    return runtime


@pytest.mark.parametrize("others", [0, 400])
def test_peak_excludes_memory_of_other_processes(others: int) -> None:
    module = Device(others=others)
    runtime = bound(module)
    module.reserved, module.most_reserved = 200, 300
    runtime.bind_thread(0)  # a later thread changes nothing
    assert runtime.peak_bytes(0) == 300
    module.reserved = module.most_reserved = 0
    assert runtime.peak_bytes(0) == 0


def test_memory_that_another_process_frees_is_not_subtracted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mooncake_hal.accelerator")
    module = Device(others=600)
    runtime = bound(module)
    module.reserved, module.most_reserved = 200, 300
    module.others = 100
    assert runtime.peak_bytes(0) == 300
    assert runtime.peak_bytes(0) == 300
    assert caplog.messages == ["cuda:0: other processes have freed 500 bytes since the start"]
    module.others = 140  # from here on, as what others allocate later counts
    assert runtime.peak_bytes(0) == 340
