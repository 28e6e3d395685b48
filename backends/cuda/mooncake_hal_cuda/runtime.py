"""Devices, threads, events and graphs, through torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mooncake_hal.backend import DeviceInfo, Event, Graph, MemoryInfo
from mooncake_hal.errors import DeviceError
from mooncake_hal.graph_pool import GraphPool

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class CudaEvent:
    """An event without timing, which is cheaper.

    Args:
        device: whose stream it marks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch

    def record(self) -> None:
        """See ``Event``."""
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """See ``Event``."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch

    def synchronize(self) -> None:
        """See ``Event``."""
        self._event.synchronize()


class CudaGraph:
    """A captured graph; it keeps the memory that its work uses."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        """See ``Graph``: the kernels read the tensors."""
        self._graph.replay()


class CudaRuntime:
    """The GPUs that CUDA_VISIBLE_DEVICES shows."""

    def __init__(self) -> None:
        count = torch.cuda.device_count()
        self._devices = tuple(_describe(index) for index in range(count))
        self._pool: GraphPool[_POOL_HANDLE] = GraphPool(torch.cuda.graph_pool_handle)

    def devices(self) -> Sequence[DeviceInfo]:
        """See ``Runtime``."""
        return self._devices

    def device(self, index: int) -> torch.device:
        """See ``Runtime``."""
        self.require(index)
        return torch.device("cuda", index)

    def bind_thread(self, index: int) -> None:
        """See ``Runtime``."""
        torch.cuda.set_device(self.device(index))

    def synchronize(self, index: int) -> None:
        """See ``Runtime``."""
        try:
            torch.cuda.synchronize(self.device(index))
        except RuntimeError as exc:
            raise DeviceError(f"cuda:{index} failed: {exc}") from exc

    def memory_info(self, index: int) -> MemoryInfo:
        """See ``Runtime``."""
        return MemoryInfo(*torch.cuda.mem_get_info(self.device(index)))

    def reset_peak(self, index: int) -> None:
        """See ``Runtime``."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device(index))

    def peak_bytes(self, index: int) -> int:
        """See ``Runtime``: of all processes that use the device, since the driver tells no more."""
        device = self.device(index)
        info = self.memory_info(index)
        returned = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return info.total_bytes - info.free_bytes + returned

    def event(self, index: int) -> Event:
        """See ``Runtime``."""
        return CudaEvent(self.device(index))

    def capture(self, run: Callable[[], None]) -> Graph:
        """See ``Runtime``. The run that comes before compiles kernels and fills library caches.

        Other threads may go on using the device meanwhile. All graphs share one pool of memory:
        what a graph has computed is lost when another one is replayed.
        """
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool.handle(), capture_error_mode="thread_local"):
            run()
        captured = CudaGraph(graph)
        self._pool.add(captured)
        return captured

    def require(self, index: int) -> None:
        """Refuse an index that no device has.

        Raises:
            DeviceError: the message says what there is.
        """
        if not 0 <= index < len(self._devices):
            raise DeviceError(
                f"cuda has {len(self._devices)} devices here, device {index} was asked for; see "
                "CUDA_VISIBLE_DEVICES"
            )


def _describe(index: int) -> DeviceInfo:
    facts = torch.cuda.get_device_properties(index)
    return DeviceInfo(index, facts.name, f"sm_{facts.major}{facts.minor}", facts.total_memory)
