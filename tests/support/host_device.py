"""A device in host memory, for tests of ``staged`` where importing torch would take too long."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.host_copies import Addresses
from mooncake_hal.testing.transports_buffers import HostBuffer
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma import rdma_plugin
from mooncake_hal.transports.staged.staged_transport import InnerTransport, StagedTransport
from mooncake_hal.transports.tcp import tcp_plugin

DEVICE = "test:0"


class DeviceBuffer(HostBuffer):
    """A buffer of the transport suite that claims to be device memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, mappable=False)

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self._region.address, self._region.nbytes, DEVICE)


allocate: Callable[[int], DeviceBuffer] = DeviceBuffer


class PinnedMemory:
    """Page-aligned host memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._raw: NDArray[np.uint8] | None = np.zeros(nbytes + 4096, np.uint8)
        self.address = -(-self._raw.ctypes.data // 4096) * 4096

    def close(self) -> None:
        self._raw = None


class Copier:
    """Copies each piece synchronously."""

    def gather(self, addresses: Addresses, nbytes: Addresses, host: int) -> None:
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(host, address, size)
            host += size

    def scatter(self, host: int, addresses: Addresses, nbytes: Addresses) -> None:
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(address, host, size)
            host += size

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class Copies:
    """The device's ``HostCopies``."""

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        return PinnedMemory(nbytes)

    def copier(self) -> Copier:
        return Copier()


def load_staged_over_tcp() -> StagedTransport:
    """The ``staged`` transport as on hosts without a NIC."""
    inner = {"tcp": InnerTransport(tcp_plugin.load(), tcp_plugin.PRIORITY)}
    return StagedTransport(lambda device: Copies(), inner)


def load_staged() -> StagedTransport:
    """The ``staged`` transport over rdma if both ends have it, as on hosts with a NIC."""
    inner = {
        "tcp": InnerTransport(tcp_plugin.load(), tcp_plugin.PRIORITY),
        "rdma": InnerTransport(rdma_plugin.load(), rdma_plugin.PRIORITY),
    }
    return StagedTransport(lambda device: Copies(), inner)
