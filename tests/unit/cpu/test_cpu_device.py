"""KV memory of the CPU backend: alignment, sharing, and freeing without leaks."""

from __future__ import annotations

import mmap
import os

import pytest

from mooncake_hal.errors import OutOfMemory
from mooncake_hal.host_memory import memory_bytes
from mooncake_hal_cpu import cpu_device
from mooncake_hal_cpu.cpu_device import ALIGNMENT, CpuMemory


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("mooncake-hal" in line for line in lines)


def test_allocations_are_aligned_to_a_huge_page() -> None:
    allocation = CpuMemory().allocate(3 * ALIGNMENT + 5, 0)
    assert allocation.region.address % ALIGNMENT == 0
    allocation.free()


def test_second_mapping_of_the_descriptor_sees_the_same_bytes() -> None:
    allocation = CpuMemory().allocate(5000, 0)
    region = allocation.region
    assert region.fd is not None
    with mmap.mmap(region.fd, region.nbytes, offset=region.fd_offset) as other:
        allocation.tensor[4999] = 42
        assert other[4999] == 42
        other[0] = 7
        assert allocation.tensor[0] == 7
    allocation.free()


def test_free_leaks_no_descriptor_or_mapping() -> None:
    before = open_descriptors(), mappings()
    for _ in range(20):
        allocation = CpuMemory().allocate(ALIGNMENT + 1, 0)
        allocation.tensor.fill_(1)
        allocation.free()
    assert (open_descriptors(), mappings()) == before


def test_failed_allocation_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "memory_bytes", lambda: (1 << 62, 1 << 62))
    before = open_descriptors()
    with pytest.raises(OutOfMemory, match=rf"{1 << 50} bytes were asked for"):
        CpuMemory().allocate(1 << 50, 0)
    assert open_descriptors() == before


def test_machine_reports_available_and_total_memory() -> None:
    available, total = memory_bytes()
    assert 0 < available <= total
