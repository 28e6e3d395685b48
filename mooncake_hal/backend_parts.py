"""What backends are put together from: a runtime without streams, a thread for copies, an
allocation, a pool for graphs, a group of one rank; what brings a host's arrays to a device; and
what turns rows of KV there.
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
    """An event of a device whose work is done when the call returns."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _WorkFence:
    """Of work that a thread does."""

    def __init__(self, work: Future[object]) -> None:
        self._work = work

    def query(self) -> bool:
        return self._work.done()

    def synchronize(self) -> None:
        self._work.result()


class CopyThread:
    """A copy stream whose work a thread of its own does, and waits for.

    Args:
        device: what errors and the thread are named after.
    """

    def __init__(self, device: str) -> None:
        self._thread = ThreadPoolExecutor(1, f"copies-{device}")

    def submit(self, work: Callable[[], object]) -> Fence:
        return _WorkFence(self._thread.submit(work))

    def close(self) -> None:
        self._thread.shutdown()


class SynchronousRuntime:
    """What the runtime of one device is that works in host memory, and in the calling thread.

    A backend adds ``devices``, ``memory_info``, the watch over the peak, and ``capture``.

    Args:
        name: of the backend, for messages.
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
        """Refuse every index but 0; raises DeviceError."""
        require_device(self._name, index)


def require_device(name: str, index: int) -> None:
    """Refuse every index but 0, for backends of one device.

    Raises:
        DeviceError: the message says what there is.
    """
    if index != 0:
        raise DeviceError(f"{name} has device 0 only, device {index} was asked for")


class TensorAllocation:
    """Memory of a backend: one tensor, its region, and a way to give it back.

    Args:
        region: where it lies.
        tensor: all of it, flat uint8.
        release: gives the memory back; None if it goes with the tensor.
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
        """Whether its memory was given back; something else may lie there by now."""
        return self._tensor is None

    @property
    def tensor(self) -> Tensor:
        """Raises DeviceError once it is freed."""
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
    """One pool for graphs that never run at once.

    torch ends a pool with the last graph that was captured in it, and refuses its handle from then
    on.

    Args:
        make_handle: of a new pool.
    """

    def __init__(self, make_handle: Callable[[], Handle]) -> None:
        self._make_handle = make_handle
        self._handle: Handle | None = None
        self._graphs: WeakSet[object] = WeakSet()

    def handle(self) -> Handle:
        """Where to capture the next graph."""
        if self._handle is None or not self._graphs:
            self._handle = self._make_handle()
        return self._handle

    def add(self, graph: object) -> None:
        """A graph was captured in it; the pool lives as long as one of them."""
        self._graphs.add(graph)


class FinishedExchange:
    """An all-to-all whose rows are there already."""

    def __init__(self, arrived: Tensor) -> None:
        self._arrived = arrived

    def wait(self) -> Tensor:
        return self._arrived


class SingleRankCommunicator:
    """Collectives of one rank; needs no process group and no port."""

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


def quantised(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x / scale`` as the cache keeps it; what is too large becomes the largest number.

    A cache of x's own type keeps it as it is.
    """
    if dtype == x.dtype:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp_(-largest, largest).to(dtype)


_ALIGNMENT = 256
"""Of each array, as an allocation of its own would have: kernels are compiled for whole words."""
_TORCH_TYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def to_device(device: torch.device, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Tensors with these arrays' content, shapes and types. Those of the host share memory with the
    arrays; for another device see ``copy_at_once``.

    Args:
        device: of the tensors.
        arrays: contiguous.

    Raises:
        TypeError: as of ``copy_at_once``, on every device alike.
    """
    if device.type != "cpu":
        return copy_at_once(device, arrays, is_pinned=True)
    for array in arrays:
        _torch_type(array)
    return [torch.from_numpy(array) for array in arrays]


def index_tensor(device: torch.device, indexes: Sequence[int]) -> Tensor:
    """[indexes] int64 on a device, which is not waited for."""
    return to_device(device, [np.array(indexes, dtype=np.int64)])[0]


def copy_at_once(
    device: torch.device, arrays: Sequence[NDArray[Any]], *, is_pinned: bool
) -> list[Tensor]:
    """Copy many small arrays as one.

    Copied one by one from pageable memory, each costs a call of the driver, which stages it first
    and may wait for the stream: steps that should run ahead of the device would wait for it (CUDA's
    "API synchronization behavior"). Here they are put behind each other in one page-locked buffer,
    which torch gives out again once its copy is done, and the tensors are views of the copy.

    Args:
        device: of the tensors.
        arrays: contiguous.
        is_pinned: whether the buffer is page-locked; else the host waits for the copy.

    Raises:
        TypeError: an array is of a type that is not brought to devices; the message says which are.
    """
    types = [_torch_type(array) for array in arrays]
    rooms = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    *starts, total = accumulate(rooms, initial=0)
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
            f"arrays that go to a device are of {known}; this one, of shape {array.shape}, is of "
            f"{array.dtype}: convert it first"
        )
    return found


@torch.inference_mode()
def turn_rope(
    planes: Sequence[Tensor], block_ids: Sequence[int], tokens: tuple[int, int], order: str
) -> None:
    """Bring rotated rows of latents into the other order, in place; returns when that is enqueued.

    Scores are sums over all elements, so that either order will do, if queries and keys have the
    same. Engines keep what suits their kernels.

    Args:
        planes: of rope rows, ``[num_blocks, block_size, 1, rope_dim]``.
        block_ids: a request's block table.
        tokens: the first whose rows are meant, and the one behind the last.
        order: what they are in: ``latents.PAIRS`` or ``latents.HALVES``.
    """
    block_size, half, device = planes[0].shape[1], planes[0].shape[-1] // 2, planes[0].device
    blocks = index_tensor(device, [block_ids[token // block_size] for token in range(*tokens)])
    offsets = index_tensor(device, [token % block_size for token in range(*tokens)])
    shape = (half, 2) if order == PAIRS else (2, half)
    for plane in planes:
        # not every device indexes floats of a byte
        numbers = plane.view(torch.uint8) if plane.element_size() == 1 else plane
        rows = numbers[blocks, offsets]
        turned = rows.view(*rows.shape[:-1], *shape).transpose(-1, -2)
        numbers[blocks, offsets] = turned.reshape(rows.shape)
