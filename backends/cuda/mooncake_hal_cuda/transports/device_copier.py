"""Copies pieces between addresses of one or two devices, on a separate stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mooncake_hal.backend_parts import copy_batched
from mooncake_hal.host_copies import Addresses
from mooncake_hal_cuda.libcuda import CudaDriver

_CHUNK_BYTES = 64 << 10
_ALIGNMENT = 16
_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """The connection between the two ends of a copy, which decides how pieces are copied.

    Args:
        large_bytes: mean size from which on each piece is one driver call. Copy engines leave the
            processors free, and copying such a piece takes longer than the host takes for the call.
        programs: largest number of programs of the kernel that copies smaller pieces.
    """

    large_bytes: int
    programs: int


WITHIN = CopyRoute(large_bytes=32 << 20, programs=512)
"""Within one device: a megabyte takes less than a microsecond if all processors take part."""
BETWEEN = CopyRoute(large_bytes=8 << 20, programs=64)
"""Between two devices: enough programs to saturate NVLink."""
HOST = CopyRoute(large_bytes=256 << 10, programs=32)
"""To and from pinned host memory, over PCIe."""


class SpanCopier(Protocol):
    """Copies pieces of memory in the order of its calls. Only one thread may use it at a time."""

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: Addresses, route: CopyRoute
    ) -> None:
        """Enqueue one copy per piece. ``drain``, or the function that ``mark`` returns, waits for
        them.

        Args:
            targets, sources, nbytes: [pieces] addresses and lengths.
            route: the connection between the two ends.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that blocks until everything enqueued so far has been copied; it must
        be called once."""
        ...

    def drain(self) -> None:
        """Block until everything enqueued has been copied."""
        ...

    def close(self) -> None:
        """Release the stream; nothing may be enqueued on it afterwards."""
        ...


class DeviceCopier:
    """A ``SpanCopier`` with one stream of one device.

    Every call makes the device current in its thread, since the driver refuses to enqueue work on a
    stream in a thread without a current device.

    Args:
        driver: enqueues large pieces.
        device: the copying device, which runs the kernel for small pieces.
        index: index of the device.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, index: int) -> None:
        self._driver = driver
        self._device = device
        self._index = index
        driver.bind(index)
        self._stream = driver.take_stream(index)
        if device.type == "cuda":
            with self._on_stream():  # which makes the device torch's current device, too
                compile_copies()  # while the instance starts, not in its first transfer

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
        self._driver.give_stream(self._index, self._stream)

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
        device: the device that copies.
        targets, sources, nbytes: [pieces] addresses and lengths.
        programs: largest number of programs.
    """
    # imported here, since an endpoint of host memory runs where triton is not installed
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
        *copy_batched(device, tables, is_pinned=device.type == "cuda"),
        len(owners),
        **options,
    )


def compile_copies() -> None:
    """Compile both specialisations of ``launch_copy``'s kernel for the current device."""
    from mooncake_hal_cuda.kernels.copy_kernels import copy_spans

    tables = (torch.int64, torch.int64, torch.int64, torch.int64, torch.int32)
    for word in (8, 1):
        copy_spans.warmup(*tables, 1, grid=(1,), **_options(word))


def _options(word: int) -> dict[str, int]:
    return {"WORD": word, "CHUNK": _CHUNK_BYTES // word, "WIDTH": _WIDTH, "num_warps": 8}


MakeCopier = Callable[[CudaDriver, torch.device, int], DeviceCopier]
