"""The runtime of devices with streams, on top of torch's module for the device type.

All these modules have the same functions: a backend passes its own, describes its devices, and
implements graph capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from mooncake_hal.backend import CopyStream, DeviceInfo, Event, Fence, MemoryInfo
from mooncake_hal.backend_parts import CopyThread, GraphPool
from mooncake_hal.errors import DeviceError

logger = logging.getLogger(__name__)


class AcceleratorEvent:
    """An event without timing, which is cheaper than one with it.

    Args:
        module: torch's module for the device type.
        device: the device whose current stream it marks.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._event: Any = module.Event()

    def record(self) -> None:
        self._event.record(self._module.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class AcceleratorCopyStream:
    """A stream for copies, and a thread that enqueues on it and waits for it: copies from or to
    memory that is not page-locked block the thread that enqueues them.

    Args:
        module: torch's module for the device type.
        device: the device that the stream belongs to.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._stream: Any = module.Stream(device)
        self._thread = CopyThread(f"{device.type}-{device.index}")

    def submit(self, work: Callable[[], object]) -> Fence:
        enqueued = self._module.Event()
        enqueued.record(self._module.current_stream(self._device))
        return self._thread.submit(partial(self._run, work, enqueued))

    def close(self) -> None:
        self._thread.close()

    def _run(self, work: Callable[[], object], enqueued: Any) -> None:
        self._module.set_device(self._device)
        with self._module.stream(self._stream):
            enqueued.wait(self._stream)
            work()
            done = self._module.Event()
            done.record(self._stream)
        done.synchronize()


class AcceleratorRuntime:
    """Base class of runtimes for the devices of one type that are visible to this process. A
    backend adds ``capture``.

    Args:
        name: the backend's name, for messages.
        module: torch's module for the device type.
        kind: torch's name of the device type.
        visible: name of the environment variable that selects the visible devices.
        devices: the devices, as the backend describes them. Those of another generation than the
            first one are refused when they are to be used.
    """

    def __init__(
        self, name: str, module: Any, kind: str, visible: str, devices: Sequence[DeviceInfo]
    ) -> None:
        self._name = name
        self._module = module
        self._kind = kind
        self._visible = visible
        self._devices = tuple(devices)
        # looked up at the first capture: modules without graphs have no pools
        self._pool: GraphPool[Any] = GraphPool(lambda: module.graph_pool_handle())
        self._capture_streams: dict[int, Any] = {}
        self._taken_before: dict[int, int] = {}

    def devices(self) -> Sequence[DeviceInfo]:
        return self._devices

    def device(self, index: int) -> torch.device:
        if not 0 <= index < len(self._devices):
            raise DeviceError(
                f"{self._name} has {len(self._devices)} devices here, device {index} was "
                f"requested; see {self._visible}"
            )
        own, first = self._devices[index].generation, self._devices[0].generation
        if own != first:  # kernels and capabilities are chosen once per process
            raise DeviceError(
                f"device {index} of {self._name} is {own}, device 0 is {first}, for which this "
                f"process has its kernels; set {self._visible} so that it shows devices of one "
                "generation only"
            )
        return torch.device(self._kind, index)

    def bind_thread(self, index: int) -> None:
        device = self.device(index)
        self._module.set_device(device)
        if index not in self._taken_before:
            info = self.memory_info(index)
            taken = info.total_bytes - info.free_bytes - self._module.memory_reserved(device)
            self._taken_before[index] = int(taken)

    def synchronize(self, index: int) -> None:
        try:
            self._module.synchronize(self.device(index))
        except RuntimeError as exc:
            raise DeviceError(f"{self._kind}:{index} failed: {exc}") from exc

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(*self._module.mem_get_info(self.device(index)))

    def reset_peak(self, index: int) -> None:
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self.device(index))

    def peak_bytes(self, index: int) -> int:
        # Drivers report the memory of all processes together. What was allocated when this process
        # bound its first thread belongs to others (and to this process's context, which exists by
        # then), so it is subtracted, less what they have freed since: an instance that this one
        # replaces may still have been exiting.
        device, info = self.device(index), self.memory_info(index)
        reserved = self._module.memory_reserved(device)
        outside = int(info.total_bytes - info.free_bytes - reserved)
        before = self._taken_before.get(index, 0)
        if outside < before:
            freed = before - outside
            logger.info("%s: other processes have freed %d bytes since the start", device, freed)
            self._taken_before[index] = before = outside
        return int(self._module.max_memory_reserved(device)) + outside - before

    def event(self, index: int) -> Event:
        return AcceleratorEvent(self._module, self.device(index))

    def copy_stream(self, index: int) -> CopyStream:
        return AcceleratorCopyStream(self._module, self.device(index))

    def run_captured(
        self, run: Callable[[], None], capture: Callable[[Any, Any], AbstractContextManager[Any]]
    ) -> None:
        """Call ``run`` twice: once to compile kernels and fill the libraries' caches, then once
        under capture.

        Other threads may keep using the device meanwhile. All graphs share one memory pool, so
        replaying a graph overwrites the results of the others.

        Args:
            run: the work to capture.
            capture: given the pool's handle and a stream, returns the context manager that
                captures.
        """
        stream = self._capture_stream()
        current = self._module.current_stream()
        stream.wait_stream(current)
        with self._module.stream(stream):
            run()
        current.wait_stream(stream)
        with capture(self._pool.handle(), stream):
            run()

    def keep_in_pool(self, graph: object) -> None:
        """Record that a graph was captured in the pool, which lives as long as any of its
        graphs."""
        self._pool.add(graph)

    def _capture_stream(self) -> Any:
        """The current device's stream on which all graphs are captured.

        For every stream on which a matrix product has run, torch allocates a workspace of tens of
        megabytes and never frees it. New streams come from a pool of 32, so a new stream per
        capture would end up holding a gigabyte, allocated after the memory for KV was measured.
        """
        index = self._module.current_device()
        if index not in self._capture_streams:
            self._capture_streams[index] = self._module.Stream()
        return self._capture_streams[index]
