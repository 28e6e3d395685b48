"""Pieces of device memory are gathered into pinned memory, and scattered from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.fake_hccs import HostStream
from torch import Tensor

from mooncake_hal.errors import DeviceError
from mooncake_hal.host_copies import Addresses
from mooncake_hal_ascend.npu_host_copies import LARGE_BYTES, NpuHostCopies

SIZE = 4 << 20


class Device:
    """A device emulated by the host, with two allocations."""

    def __init__(self) -> None:
        self.allocations = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(2)]

    def around(self, address: int) -> Tensor | None:
        for memory in self.allocations:
            if memory.data_ptr() <= address < memory.data_ptr() + SIZE:
                return memory
        return None

    def copies(self) -> NpuHostCopies:
        return NpuHostCopies(self.around, torch.device("cpu"), HostStream(), pin=False)


def pieces(device: Device, sizes: list[int]) -> tuple[Addresses, Addresses]:
    """Return addresses [n] and lengths [n] of separate pieces in both allocations."""
    addresses, at = [], 0
    for number, size in enumerate(sizes):
        memory = device.allocations[number % 3 == 2]
        addresses.append(memory.data_ptr() + at)
        at += 2 * size
    return np.array(addresses, np.uint64), np.array(sizes, np.uint64)


@pytest.mark.parametrize(
    "sizes", [[64] * 9, [128, 256, 64, 64], [5, 7, 1], [LARGE_BYTES, LARGE_BYTES + 64]], ids=str
)
def test_gather_and_scatter_round_trip(sizes: list[int]) -> None:
    device = Device()
    copies = device.copies()
    addresses, nbytes = pieces(device, sizes)
    pinned, copier = copies.allocate_pinned(SIZE), copies.copier()
    before = [memory.clone() for memory in device.allocations]
    copier.gather(addresses, nbytes, pinned.address)
    copier.drain()
    for memory in device.allocations:
        memory.zero_()
    copier.scatter(pinned.address, addresses, nbytes)
    copier.drain()
    for memory, earlier in zip(device.allocations, before, strict=True):
        kept = torch.zeros(SIZE, dtype=torch.bool)
        for address, size in zip(addresses.tolist(), sizes, strict=True):
            if 0 <= (begin := address - memory.data_ptr()) < SIZE:
                kept[begin : begin + size] = True
        assert (memory == torch.where(kept, earlier, 0)).all()
    copier.close()
    pinned.close()


def test_memory_outside_the_allocations_is_rejected() -> None:
    device = Device()
    copies = device.copies()
    pinned, copier = copies.allocate_pinned(SIZE), copies.copier()
    addresses, nbytes = pieces(device, [64])
    with pytest.raises(DeviceError, match="is in no allocation of cpu"):
        copier.gather(np.array([64], np.uint64), nbytes, pinned.address)
    with pytest.raises(DeviceError, match="leaves its allocation"):
        copier.gather(addresses, np.array([SIZE + 64], np.uint64), pinned.address)
    pinned.close()
    with pytest.raises(DeviceError, match="are not in pinned memory"):
        copier.gather(addresses, nbytes, pinned.address)
