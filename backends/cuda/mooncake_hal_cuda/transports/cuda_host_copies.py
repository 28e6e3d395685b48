"""Copies between GPU memory and pinned host memory, on a separate stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake_hal.host_copies import Addresses
from mooncake_hal.transports.staging import packed_addresses
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.transports.device_copier import HOST, DeviceCopier, MakeCopier


class CudaPinnedMemory:
    """Pinned host memory that has the same address for every GPU.

    Args:
        driver: allocates the memory.
        index: index of the GPU whose context owns it.
        nbytes: length in bytes.
    """

    def __init__(self, driver: CudaDriver, index: int, nbytes: int) -> None:
        self._driver = driver
        self._index = index
        driver.bind(index)
        self.address = driver.allocate_host(nbytes)
        self.nbytes = nbytes

    def close(self) -> None:
        if self.address:
            self._driver.bind(self._index)  # close may be called by any thread
            self._driver.free_host(self.address)
            self.address = 0


class CudaHostCopier:
    """Packs and unpacks pieces with a kernel, or large ones with the copy engines.

    Args:
        copier: copies on the GPU's behalf.
    """

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier

    def gather(self, addresses: Addresses, nbytes: Addresses, host: int) -> None:
        self._copier.copy(packed_addresses(host, nbytes), addresses, nbytes, HOST)

    def scatter(self, host: int, addresses: Addresses, nbytes: Addresses) -> None:
        self._copier.copy(addresses, packed_addresses(host, nbytes), nbytes, HOST)

    def drain(self) -> None:
        self._copier.drain()

    def close(self) -> None:
        self._copier.close()


@dataclass(frozen=True, slots=True)
class CudaHostCopies:
    """``HostCopies`` of one GPU.

    Args:
        driver: the driver.
        index: index of the GPU.
        make_copier: makes copiers; replaced only in tests.
    """

    driver: CudaDriver
    index: int
    make_copier: MakeCopier = DeviceCopier

    def allocate_pinned(self, nbytes: int) -> CudaPinnedMemory:
        return CudaPinnedMemory(self.driver, self.index, nbytes)

    def copier(self) -> CudaHostCopier:
        device = torch.device("cuda", self.index)
        return CudaHostCopier(self.make_copier(self.driver, device, self.index))
