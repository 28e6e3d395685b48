"""Pinned host memory that device memory passes through."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mooncake_hal.transport import Endpoint, MemoryRegion
from mooncake_hal_cuda.copying.copier import (
    HOST,
    Addresses,
    Copier,
    Copies,
    MakeCopier,
)
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.staged.messages import SLOT_BYTES, SLOTS, packed


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device of an endpoint.

    Args:
        driver: of the hardware.
        index: the device's number.
        make_copier: another one only in tests.
    """

    driver: CudaDriver
    index: int
    make_copier: MakeCopier

    def copier(self) -> Copier:
        """One for the calling thread."""
        return self.make_copier(self.driver, torch.device("cuda", self.index), self.index)


@dataclass(frozen=True, slots=True)
class PinnedBuffer:
    """Pinned memory that the inner endpoint has registered; close it once.

    Args:
        address: first byte, for this process and for its device.
        undo: frees it.
    """

    address: int
    undo: ExitStack

    @classmethod
    def allocate(cls, gpu: Gpu, inner: Endpoint) -> PinnedBuffer:
        """All slots of it; raises DeviceError or OutOfMemory."""
        nbytes = SLOTS * SLOT_BYTES
        with ExitStack() as undo:
            gpu.driver.bind(gpu.index)
            address = gpu.driver.allocate_host(nbytes)
            undo.callback(gpu.driver.free_host, address)
            key = inner.register(MemoryRegion(address, nbytes))
            undo.callback(inner.revoke, key)
            return cls(address, undo.pop_all())

    def slot(self, number: int) -> int:
        """Where a slot begins."""
        return self.address + number * SLOT_BYTES

    def gather(self, copier: Copies, addresses: Addresses, nbytes: Addresses, slot: int) -> None:
        """Pack pieces of device memory into a slot."""
        copier.copy(packed(self.slot(slot), nbytes), addresses, nbytes, HOST)
        copier.drain()

    def scatter(self, copier: Copies, addresses: Addresses, nbytes: Addresses, slot: int) -> None:
        """Unpack a slot into pieces of device memory."""
        copier.copy(addresses, packed(self.slot(slot), nbytes), nbytes, HOST)
        copier.drain()

    def close(self) -> None:
        """Give it back."""
        self.undo.close()
