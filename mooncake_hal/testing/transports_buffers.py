"""Buffers for the transport suite, and random pieces of them."""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.registry import Registry
from mooncake_hal.transport import MemoryRegion, Spans, Transport

GAP_BYTES = 16
"""Largest number of guard bytes that ``random_spans`` leaves between neighbouring pieces."""


class Buffer(Protocol):
    """Memory that is moved in tests; buffers of a device copy in ``put`` and ``get``."""

    @property
    def region(self) -> MemoryRegion:
        """The region to register."""
        ...

    def put(self, content: NDArray[np.uint8]) -> None:
        """Overwrite the whole buffer; ``content`` has exactly its size."""
        ...

    def get(self) -> NDArray[np.uint8]:
        """Return a copy of the whole buffer."""
        ...

    def close(self) -> None:
        """Free the buffer."""
        ...


class HostBuffer:
    """Host memory; with ``mappable``, a memfd that another process can map.

    Args:
        nbytes: size in bytes.
        mappable: whether ``region.fd`` is set.
    """

    def __init__(self, nbytes: int, *, mappable: bool) -> None:
        self._fd: int | None = None
        if mappable:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._fd = os.memfd_create("mooncake-test", flags)
            os.ftruncate(self._fd, nbytes)
        self._map = mmap.mmap(-1 if self._fd is None else self._fd, nbytes)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self._region = MemoryRegion(self._bytes.ctypes.data, nbytes, fd=self._fd)

    @property
    def region(self) -> MemoryRegion:
        """The region to register."""
        return self._region

    def put(self, content: NDArray[np.uint8]) -> None:
        """Overwrite the whole buffer."""
        assert self._bytes is not None
        self._bytes[:] = content

    def get(self) -> NDArray[np.uint8]:
        """Return a copy of the whole buffer."""
        assert self._bytes is not None
        return self._bytes.copy()

    def close(self) -> None:
        """Unmap the buffer. Idempotent."""
        self._bytes = None
        self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def anonymous(nbytes: int) -> HostBuffer:
    """Allocate host memory that only its own process can map."""
    return HostBuffer(nbytes, mappable=False)


def mappable(nbytes: int) -> HostBuffer:
    """Allocate host memory in a memfd."""
    return HostBuffer(nbytes, mappable=True)


def resolve(path: str) -> Callable[..., Any]:
    """Import the callable that ``"package.module:name"`` names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def load_transport(path: str) -> Transport:
    """Load the installed transport named ``path``, or call the loader ``"module:name"``."""
    if ":" not in path:
        return Registry.discover().load_transport(path)
    transport: Transport = resolve(path)()
    return transport


@dataclass(frozen=True, slots=True)
class ScatteredPieces:
    """Pieces as offsets into two buffers: [n] int64 each."""

    near: NDArray[np.int64]
    far: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def spans(self, near: MemoryRegion, far: MemoryRegion) -> Spans:
        """Return the same pieces as absolute addresses."""
        return Spans(
            local=(self.near + near.address).astype(np.uint64),
            remote=(self.far + far.address).astype(np.uint64),
            nbytes=self.nbytes.astype(np.uint64),
        )

    def after_read(self, near: NDArray[np.uint8], far: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the near buffer's expected content after a read, guard bytes included."""
        return _copied(near, self.near, far, self.far, self.nbytes)

    def after_write(self, near: NDArray[np.uint8], far: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the far buffer's expected content after a write, guard bytes included."""
        return _copied(far, self.far, near, self.near, self.nbytes)


def _copied(
    target: NDArray[np.uint8],
    target_at: NDArray[np.int64],
    source: NDArray[np.uint8],
    source_at: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> NDArray[np.uint8]:
    result = target.copy()
    for at, start, size in zip(
        target_at.tolist(), source_at.tolist(), nbytes.tolist(), strict=True
    ):
        result[at : at + size] = source[start : start + size]
    return result


def random_pieces(
    rng: np.random.Generator, nbytes: NDArray[np.int64], size: int
) -> ScatteredPieces:
    """Place disjoint pieces of the given lengths in two buffers, in unrelated orders.

    Args:
        rng: random generator of the placement.
        nbytes: [n] lengths of the pieces.
        size: size of each of the two buffers in bytes; must be enough for the pieces and gaps.
    """
    return ScatteredPieces(_place(rng, nbytes, size), _place(rng, nbytes, size), nbytes)


def _place(rng: np.random.Generator, nbytes: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    order = rng.permutation(len(nbytes))
    gaps = rng.integers(0, GAP_BYTES, len(nbytes))
    ends = np.cumsum(nbytes[order] + gaps)
    if len(ends) and ends[-1] > size:
        raise ValueError(f"{len(nbytes)} pieces need {ends[-1]} bytes, the buffer has {size}")
    offsets = np.empty(len(nbytes), np.int64)
    offsets[order] = ends - nbytes[order]
    return offsets
