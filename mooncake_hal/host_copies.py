"""The contract of host copies: pinned memory, and copies between it and a device's memory.

The copies run on a stream of their own, concurrently with the device's computation. A backend whose
devices have their own memory offers host copies in its ``BackendSpec``; the ``staged`` transport,
which is written against this contract, then works for its devices.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


class PinnedMemory(Protocol):
    """Page-locked host memory, which the device copies from and to by DMA."""

    @property
    def address(self) -> int:
        """Address of the first byte; a multiple of 64."""
        ...

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...

    def close(self) -> None:
        """Free the memory. May be called from any thread, once no copy uses the memory any more.
        Idempotent."""
        ...


class HostCopier(Protocol):
    """Copies pieces of device memory in call order. Only one thread at a time may use it.

    Copies do not wait for the device's computation: the caller must know that pieces to be read
    are completely written, and that pieces to be written are not in use.
    """

    def gather(
        self,
        addresses: Addresses,  # [pieces] in the memory of the device's backend
        nbytes: Addresses,  # [pieces]
        host: int,  # address of pinned memory
    ) -> None:
        """Enqueue copies of the pieces to pinned memory, packed one after the other from ``host``
        on."""
        ...

    def scatter(
        self,
        host: int,  # address of pinned memory
        addresses: Addresses,  # [pieces] in the memory of the device's backend
        nbytes: Addresses,  # [pieces]
    ) -> None:
        """Enqueue copies from pinned memory, packed from ``host`` on, to the pieces."""
        ...

    def drain(self) -> None:
        """Block until all enqueued copies have finished; raises DeviceError if one failed."""
        ...

    def close(self) -> None:
        """Release the stream."""
        ...


class HostCopies(Protocol):
    """The host copies of one device; may be used from any thread."""

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Allocate pinned memory; raises OutOfMemory or DeviceError."""
        ...

    def copier(self) -> HostCopier:
        """Create a copier for the calling thread."""
        ...
