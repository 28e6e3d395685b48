"""The contract of host copies: pinned memory, and copies between it and a device's memory.

They run beside what the device computes, on a stream of their own. A backend whose devices have
memory of their own offers them in its ``BackendSpec``; what is written once against them (the
``staged`` transport) then works for its devices, too.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


class PinnedMemory(Protocol):
    """Host memory that a device copies from and to without the processor's help."""

    @property
    def address(self) -> int:
        """Its first byte, at a multiple of 64."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length."""
        ...

    def close(self) -> None:
        """Give it back, from any thread. Idempotent; nothing copies from or to it any more."""
        ...


class HostCopier(Protocol):
    """Copies pieces of device memory in the order of its calls. One thread at a time uses it.

    Copies don't wait for what the device computes: the caller knows that the pieces are written,
    or that nobody reads them.
    """

    def gather(
        self,
        addresses: Addresses,  # [pieces] in the memory of the device's backend
        nbytes: Addresses,  # [pieces]
        host: int,  # address of pinned memory
    ) -> None:
        """Enqueue packing the pieces into pinned memory, one behind the other from ``host`` on."""
        ...

    def scatter(
        self,
        host: int,  # address of pinned memory
        addresses: Addresses,  # [pieces] in the memory of the device's backend
        nbytes: Addresses,  # [pieces]
    ) -> None:
        """Enqueue unpacking what lies packed from ``host`` on into the pieces."""
        ...

    def drain(self) -> None:
        """Block until everything that was enqueued has been copied; raises DeviceError."""
        ...

    def close(self) -> None:
        """Give the stream back."""
        ...


class HostCopies(Protocol):
    """Of one device. Any thread."""

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Allocate pinned memory; raises OutOfMemory or DeviceError."""
        ...

    def copier(self) -> HostCopier:
        """Make a copier for the calling thread."""
        ...
