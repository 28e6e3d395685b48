"""The chip's memory, and its copies to and from the host, which PD with other hardware requires.

With these copies, the ``staged`` transport moves KV between this chip and any other device or host
through pinned host memory. A transport of its own for two such chips would be an additional
``TransportSpec``; see ``docs/examples/mylink``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from mooncake_hal.backend_parts import TensorAllocation, require_device
from mooncake_hal.errors import DeviceError, OutOfMemory
from mooncake_hal.host_copies import Addresses
from mooncake_hal.transport import MemoryRegion

TOTAL_BYTES = 8 << 30
DEVICE = "mychip:0"


class MyChipMemory:
    """Allocates device memory. If the chip's network requires alignment, align here.

    Regions name the chip as their device, so transports for host memory reject them.
    """

    def __init__(self) -> None:
        self._allocations: dict[int, int] = {}

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        require_device("mychip", index)
        if nbytes > TOTAL_BYTES:
            raise OutOfMemory(
                f"{nbytes} bytes were asked for, {TOTAL_BYTES} of {TOTAL_BYTES} bytes are free"
            )
        # A real chip: on its device. As there, a page takes no memory of the host until it is used.
        tensor = torch.from_numpy(np.zeros(nbytes, np.uint8))
        begin = tensor.data_ptr()
        self._allocations[begin] = nbytes
        region = MemoryRegion(begin, nbytes, DEVICE)
        return TensorAllocation(region, tensor, lambda: self._allocations.pop(begin, None))

    def require_allocated(self, addresses: Addresses, nbytes: Addresses) -> None:
        """Raise DeviceError for addresses outside the chip's allocations, as a driver would."""
        ends = addresses + nbytes
        for begin, size in list(self._allocations.items()):
            inside = (addresses >= begin) & (ends <= begin + size)
            if inside.all():
                return
            addresses, ends = addresses[~inside], ends[~inside]
        if len(addresses):
            raise DeviceError(f"{addresses[0]:#x} is in no allocation of {DEVICE}")


@dataclass
class MyChipPinnedMemory:
    """Host memory that the chip can access. A real backend allocates it with its driver."""

    nbytes: int
    _tensor: torch.Tensor | None = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self._tensor = torch.empty(self.nbytes, dtype=torch.uint8)
        self.address = self._tensor.data_ptr()  # torch aligns to 64 bytes, as the contract requires

    def close(self) -> None:
        self._tensor = None


class MyChipHostCopier:
    """Copies synchronously. A real backend enqueues copies on its own stream, and packs small spans
    with a kernel: one copy command per token would take longer than the transfer."""

    def __init__(self, memory: MyChipMemory) -> None:
        self._memory = memory

    def gather(self, addresses: Addresses, nbytes: Addresses, host: int) -> None:
        self._memory.require_allocated(addresses, nbytes)
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(host, address, size)
            host += size

    def scatter(self, host: int, addresses: Addresses, nbytes: Addresses) -> None:
        self._memory.require_allocated(addresses, nbytes)
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(address, host, size)
            host += size

    def drain(self) -> None:
        pass  # a real chip: wait for the stream

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class MyChipHostCopies:
    """Host copies of the one device."""

    memory: MyChipMemory

    def allocate_pinned(self, nbytes: int) -> MyChipPinnedMemory:
        return MyChipPinnedMemory(nbytes)

    def copier(self) -> MyChipHostCopier:
        return MyChipHostCopier(self.memory)
