"""Copies pieces between addresses of one device or of two, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mooncake_hal.errors import DeviceError
from mooncake_hal_cuda.driver import CudaDriver

Addresses = NDArray[np.uint64]

LARGE_BYTES = 1 << 20
"""Pieces of this size on average are one call each: the copy engines take no processor away."""

_PROGRAMS = 32
_CHUNK_BYTES = 64 << 10
_ALIGNMENT = 16
_WIDTH = 2048


class Copier:
    """One stream of one device. Use it from one thread.

    Args:
        driver: enqueues large pieces.
        device: that copies; small pieces are moved by a kernel on it.
        index: its number.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, index: int) -> None:
        self._driver = driver
        self._device = device
        driver.bind(index)
        self._stream = driver.new_stream()

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Enqueue one copy per piece; ``drain`` waits for them."""
        if int(nbytes.sum()) >= LARGE_BYTES * len(nbytes):
            pieces = zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True)
            for target, source, size in pieces:
                self._driver.copy(target, source, size, self._stream)
            return
        with self._on_stream():
            self.launch(targets, sources, nbytes)

    def launch(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Enqueue the kernel that copies many small pieces."""
        launch_copy(self._device, targets, sources, nbytes)

    def drain(self) -> None:
        """Block until everything that was enqueued has been copied."""
        self._driver.drain(self._stream)

    def close(self) -> None:
        """Give the stream back."""
        self._driver.destroy_stream(self._stream)

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        raw = self._stream.value or 0
        stream = torch.cuda.ExternalStream(raw, self._device)  # type: ignore[no-untyped-call]  # torch
        return torch.cuda.stream(stream)


class HostCopier:
    """The copier of an endpoint whose memory is the host's; nobody has anything for it."""

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Refuse."""
        raise DeviceError("memory of the host is not copied by a device")

    def drain(self) -> None:
        """Nothing was enqueued."""

    def close(self) -> None:
        """There is nothing to give back."""


class Copies(Protocol):
    """A copier of either kind."""

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``Copier``."""
        ...

    def drain(self) -> None:
        """See ``Copier``."""
        ...

    def close(self) -> None:
        """See ``Copier``."""
        ...


def launch_copy(
    device: torch.device, targets: Addresses, sources: Addresses, nbytes: Addresses
) -> None:
    """Launch one kernel for all pieces, on the current stream."""
    # here, since an endpoint of host memory runs where triton is not installed
    from mooncake_hal_cuda.kernels.copy_spans import copy_spans

    def uploaded(values: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    every = int(np.bitwise_or.reduce(targets | sources | nbytes))
    word = 8 if every % _ALIGNMENT == 0 else 1
    chunk = _CHUNK_BYTES // word
    sizes = nbytes.astype(np.int64) // word
    chunks = -(-sizes // chunk)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int32), chunks)
    copy_spans[(min(_PROGRAMS, len(owners)),)](
        uploaded(sources.view(np.int64)),
        uploaded(targets.view(np.int64)),
        uploaded(sizes),
        uploaded(np.cumsum(chunks) - chunks),
        uploaded(owners),
        len(owners),
        WORD=word,
        CHUNK=chunk,
        WIDTH=_WIDTH,
        num_warps=8,
    )


MakeCopier = Callable[[CudaDriver, torch.device, int], Copier]
