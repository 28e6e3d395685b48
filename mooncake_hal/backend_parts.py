"""Building blocks that backends share: a runtime without streams, a copy thread, an allocation, a
graph memory pool, a single-rank communicator, copies of host arrays to a device, and the reordering
of rotated KV rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_hal.backend import CopyStream, Event, Exchange, Fence
from mooncake_hal.errors import DeviceError
from mooncake_hal.latents import PAIRS
from mooncake_hal.transport import MemoryRegion


class FinishedEvent:
    """An event of a device that executes work synchronously: it has always finished."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _WorkFence:
    """Completion of work that a thread executes."""

    def __init__(self, work: Future[object]) -> None:
        self._work = work

    def query(self) -> bool:
        return self._work.done()

    def synchronize(self) -> None:
        self._work.result()


class CopyThread:
    """A copy stream that executes submitted work on a thread of its own, one item after the other.

    Args:
        device: name of the device, for the thread's name.
    """

    def __init__(self, device: str) -> None:
        self._thread = ThreadPoolExecutor(1, f"copies-{device}")

    def submit(self, work: Callable[[], object]) -> Fence:
        return _WorkFence(self._thread.submit(work))

    def close(self) -> None:
        self._thread.shutdown()


class SynchronousRuntime:
    """Base class of runtimes whose single device is the host: its memory is host memory, and work
    runs synchronously in the calling thread.

    A backend adds ``devices``, ``memory_info``, ``reset_peak``, ``peak_bytes`` and ``capture``.

    Args:
        name: the backend's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def device(self, index: int) -> torch.device:
        self.require_device(index)
        return torch.device("cpu")

    def bind_thread(self, index: int) -> None:
        self.require_device(index)

    def synchronize(self, index: int) -> None:
        self.require_device(index)

    def event(self, index: int) -> Event:
        self.require_device(index)
        return FinishedEvent()

    def copy_stream(self, index: int) -> CopyStream:
        self.require_device(index)
        return CopyThread(self._name)

    def require_device(self, index: int) -> None:
        """Raise DeviceError for every index but 0."""
        require_device(self._name, index)


def require_device(name: str, index: int) -> None:
    """Check a device index of a backend that has a single device.

    Raises:
        DeviceError: the index is not 0.
    """
    if index != 0:
        raise DeviceError(f"{name} has only device 0, device {index} was requested")


class TensorAllocation:
    """An allocation of a backend: one tensor, its region, and how to release it.

    Args:
        region: the memory to register with transports.
        tensor: the whole allocation, flat uint8.
        release: releases the memory; None if it is released with the tensor.
    """

    def __init__(
        self, region: MemoryRegion, tensor: Tensor, release: Callable[[], object] | None = None
    ) -> None:
        self._region = region
        self._tensor: Tensor | None = tensor
        self._release = release

    @property
    def region(self) -> MemoryRegion:
        return self._region

    @property
    def is_freed(self) -> bool:
        """Whether the memory was released; it may have been reused since."""
        return self._tensor is None

    @property
    def tensor(self) -> Tensor:
        """Raises DeviceError once the allocation is freed."""
        if self._tensor is None:
            raise DeviceError(f"this allocation of {self._region.nbytes} bytes has been freed")
        return self._tensor

    def free(self) -> None:
        if self._tensor is None:
            return
        self._tensor = None
        if self._release is not None:
            self._release()


Handle = TypeVar("Handle")


class GraphPool(Generic[Handle]):
    """One memory pool shared by graphs that never run concurrently.

    torch destroys a pool together with the last graph that was captured in it and rejects its
    handle afterwards; a new pool is created then.

    Args:
        make_handle: creates a pool and returns its handle.
    """

    def __init__(self, make_handle: Callable[[], Handle]) -> None:
        self._make_handle = make_handle
        self._handle: Handle | None = None
        self._graphs: WeakSet[object] = WeakSet()

    def handle(self) -> Handle:
        """Handle of the pool in which to capture the next graph."""
        if self._handle is None or not self._graphs:
            self._handle = self._make_handle()
        return self._handle

    def add(self, graph: object) -> None:
        """Record that a graph was captured in the pool, which lives as long as any of its
        graphs."""
        self._graphs.add(graph)


class FinishedExchange:
    """An all-to-all that has already completed."""

    def __init__(self, arrived: Tensor) -> None:
        self._arrived = arrived

    def wait(self) -> Tensor:
        return self._arrived


class SingleRankCommunicator:
    """Collectives of a group of one rank; needs no process group and no port."""

    rank = 0
    world_size = 1
    waited_s: Mapping[str, float] = MappingProxyType({})

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def start_all_to_all(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]
    ) -> Exchange:
        return FinishedExchange(x)

    def send(self, x: Tensor, target: int) -> None:
        raise DeviceError(f"send: there is no rank {target} in a group of one")

    def recv(self, x: Tensor, source: int) -> Tensor:
        raise DeviceError(f"recv: there is no rank {source} in a group of one")

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def quantize_kv(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return ``x / scale`` in the cache's dtype, saturated at its largest finite number.

    If the cache has x's own dtype, x is returned unscaled.
    """
    if dtype == x.dtype:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp_(-largest, largest).to(dtype)


_ALIGNMENT = 256
"""Alignment of each array in bytes, as in an allocation of its own: kernels are compiled for
aligned word accesses."""
_TORCH_TYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def to_device(device: torch.device, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return tensors on a device with the arrays' content, shapes and types. Tensors on the host
    share memory with the arrays; for other devices, see ``copy_batched``.

    Args:
        device: the tensors' device.
        arrays: contiguous arrays.

    Raises:
        TypeError: an array's type is not supported, on any device; see ``copy_batched``.
    """
    if device.type != "cpu":
        return copy_batched(device, arrays, is_pinned=True)
    for array in arrays:
        _torch_type(array)
    return [torch.from_numpy(array) for array in arrays]


def index_tensor(device: torch.device, indexes: Sequence[int]) -> Tensor:
    """Return the indexes as an int64 tensor on a device, without waiting for the device."""
    return to_device(device, [np.array(indexes, dtype=np.int64)])[0]


def copy_batched(
    device: torch.device, arrays: Sequence[NDArray[Any]], *, is_pinned: bool
) -> list[Tensor]:
    """Copy many small arrays to a device in one transfer.

    Copied one by one from pageable memory, each array costs a driver call, which stages it first
    and may wait for the stream, so that steps which should run ahead of the device would block on
    it (CUDA's "API synchronization behavior"). Here the arrays are packed into one page-locked
    buffer, which torch reuses once its copy is done, and the tensors are views of the copy.

    Args:
        device: the tensors' device.
        arrays: contiguous arrays.
        is_pinned: whether the buffer is page-locked; otherwise the call blocks until it is copied.

    Raises:
        TypeError: an array's type is not supported; the message lists the supported types.
    """
    types = [_torch_type(array) for array in arrays]
    padded_sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    *starts, total = accumulate(padded_sizes, initial=0)
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=is_pinned)
    content = buffer.numpy()
    for start, array in zip(starts, arrays, strict=True):
        content[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    whole = buffer.to(device, non_blocking=is_pinned)
    return [
        whole[start : start + array.nbytes].view(torch_type).view(array.shape)
        for start, torch_type, array in zip(starts, types, arrays, strict=True)
    ]


def _torch_type(array: NDArray[Any]) -> torch.dtype:
    found = _TORCH_TYPES.get(array.dtype)
    if found is None:
        known = ", ".join(str(each) for each in _TORCH_TYPES)
        raise TypeError(
            f"an array of shape {array.shape} has dtype {array.dtype}, but only {known} can be "
            "copied to a device: convert it first"
        )
    return found


@torch.inference_mode()
def convert_rope_order(
    planes: Sequence[Tensor], block_ids: Sequence[int], tokens: tuple[int, int], order: str
) -> None:
    """Convert rope rows from their current element order to the other one, in place; returns when
    the work is enqueued.

    Attention scores are sums over all elements, so either order works as long as queries and keys
    have the same one; engines choose the order that suits their kernels.

    Args:
        planes: planes of rope rows, ``[num_blocks, block_size, 1, rope_dim]``.
        block_ids: a request's block table.
        tokens: half-open range of token positions whose rows are converted.
        order: current order of the rows: ``latents.PAIRS`` or ``latents.HALVES``.
    """
    block_size, half, device = planes[0].shape[1], planes[0].shape[-1] // 2, planes[0].device
    blocks = index_tensor(device, [block_ids[token // block_size] for token in range(*tokens)])
    offsets = index_tensor(device, [token % block_size for token in range(*tokens)])
    shape = (half, 2) if order == PAIRS else (2, half)
    for plane in planes:
        # not every device can index one-byte floats
        numbers = plane.view(torch.uint8) if plane.element_size() == 1 else plane
        rows = numbers[blocks, offsets]
        converted = rows.view(*rows.shape[:-1], *shape).transpose(-1, -2)
        numbers[blocks, offsets] = converted.reshape(rows.shape)
