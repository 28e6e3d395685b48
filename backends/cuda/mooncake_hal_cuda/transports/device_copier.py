"""Copies pieces between addresses of one device or of two, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mooncake_hal.backend_parts import copy_at_once
from mooncake_hal.host_copies import Addresses
from mooncake_hal_cuda.libcuda import CudaDriver

_CHUNK_BYTES = 64 << 10
_ALIGNMENT = 16
_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """What lies between the two ends of a copy, and decides how it is made.

    Args:
        large_bytes: pieces of this size on average are one call each: copy engines leave the
            processors free, and take longer for a piece than the host for the call.
        programs: of the kernel that copies smaller pieces.
    """

    large_bytes: int
    programs: int


WITHIN = CopyRoute(large_bytes=32 << 20, programs=512)
"""One device: a megabyte takes less than a microsecond, if every processor takes part."""
BETWEEN = CopyRoute(large_bytes=8 << 20, programs=64)
"""Two devices: enough to keep NVLink busy."""
HOST = CopyRoute(large_bytes=256 << 10, programs=32)
"""Pinned memory of the host, over PCIe."""


class SpanCopier(Protocol):
    """Copies pieces of memory in the order of its calls. One thread at a time uses it."""

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: Addresses, route: CopyRoute
    ) -> None:
        """Enqueue one copy per piece; ``drain``, or what ``mark`` returns, waits for them.

        Args:
            targets, sources, nbytes: [pieces] addresses and lengths.
            route: what lies between the two ends.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """What blocks until all that was enqueued so far has been copied; call it once."""
        ...

    def drain(self) -> None:
        """Block until everything that was enqueued has been copied."""
        ...

    def close(self) -> None:
        """Give the stream back."""
        ...


class DeviceCopier:
    """One stream of one device, which every call makes current in its thread: the driver refuses
    work on a stream, and its end, in a thread that has no device.

    Args:
        driver: enqueues large pieces.
        device: that copies; small pieces are moved by a kernel on it.
        index: its number.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, index: int) -> None:
        self._driver = driver
        self._device = device
        self._index = index
        driver.bind(index)
        self._stream = driver.new_stream()
        if device.type == "cuda":
            with self._on_stream():  # which makes the device torch's, too
                compile_copies()  # while the instance starts, and not in its first transfer

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: Addresses, route: CopyRoute
    ) -> None:
        self._driver.bind(self._index)
        if int(nbytes.sum()) >= route.large_bytes * len(nbytes):
            pieces = zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True)
            for target, source, size in pieces:
                self._driver.copy(target, source, size, self._stream)
            return
        with self._on_stream():
            self.launch(targets, sources, nbytes, route.programs)

    def launch(
        self, targets: Addresses, sources: Addresses, nbytes: Addresses, programs: int
    ) -> None:
        """Enqueue the kernel that copies many small pieces."""
        launch_copy(self._device, targets, sources, nbytes, programs)

    def mark(self) -> Callable[[], None]:
        event = self._driver.mark(self._stream)
        return lambda: self._driver.reach(event)

    def drain(self) -> None:
        self._driver.bind(self._index)
        self._driver.drain(self._stream)

    def close(self) -> None:
        self._driver.bind(self._index)
        self._driver.destroy_stream(self._stream)

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        raw = self._stream.value or 0
        stream = torch.cuda.ExternalStream(raw, self._device)  # type: ignore[no-untyped-call]  # torch
        return torch.cuda.stream(stream)


def launch_copy(
    device: torch.device,
    targets: Addresses,
    sources: Addresses,
    nbytes: Addresses,
    programs: int,
) -> None:
    """Launch one kernel for all pieces, on the current stream.

    Args:
        device: that copies.
        targets, sources, nbytes: [pieces] addresses and lengths.
        programs: the most of them.
    """
    # here, since an endpoint of host memory runs where triton is not installed
    from mooncake_hal_cuda.kernels.copy_kernels import copy_spans

    every = int(np.bitwise_or.reduce(targets | sources | nbytes))
    word = 8 if every % _ALIGNMENT == 0 else 1
    options = _options(word)
    chunk = options["CHUNK"]
    sizes = nbytes.astype(np.int64) // word
    chunks = -(-sizes // chunk)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int32), chunks)
    firsts = np.cumsum(chunks) - chunks
    tables = (sources.view(np.int64), targets.view(np.int64), sizes, firsts, owners)
    copy_spans[(min(programs, len(owners)),)](
        *copy_at_once(device, tables, is_pinned=device.type == "cuda"),
        len(owners),
        **options,
    )


def compile_copies() -> None:
    """Compile the kernel of ``launch_copy`` for the current device, in both of its forms."""
    from mooncake_hal_cuda.kernels.copy_kernels import copy_spans

    tables = (torch.int64, torch.int64, torch.int64, torch.int64, torch.int32)
    for word in (8, 1):
        copy_spans.warmup(*tables, 1, grid=(1,), **_options(word))


def _options(word: int) -> dict[str, int]:
    return {"WORD": word, "CHUNK": _CHUNK_BYTES // word, "WIDTH": _WIDTH, "num_warps": 8}


MakeCopier = Callable[[CudaDriver, torch.device, int], DeviceCopier]
