"""The runtime of devices with streams, over the module that torch has for their kind.

These modules have the same functions: a backend names its own, describes its devices, and says how
a graph is captured there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from mooncake_hal.backend import CopyStream, DeviceInfo, Event, Fence, MemoryInfo
from mooncake_hal.backend_parts import CopyThread, GraphPool
from mooncake_hal.errors import DeviceError


class AcceleratorEvent:
    """An event without timing, which is cheaper.

    Args:
        module: of the devices.
        device: whose stream it marks.
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
    """A stream for copies, and the thread that enqueues on it and waits for it: a copy from or to
    memory that is not page-locked would hold up whoever enqueues it.

    Args:
        module: of the devices.
        device: whose stream.
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
    """The devices of one kind that this process sees. A backend adds ``capture``.

    Args:
        name: of the backend, for messages.
        module: torch's, of this kind of device.
        kind: what torch calls such a device.
        visible: the environment variable that shows and hides devices.
        devices: described by the backend.
    """

    def __init__(
        self, name: str, module: Any, kind: str, visible: str, devices: Sequence[DeviceInfo]
    ) -> None:
        self._name = name
        self._module = module
        self._kind = kind
        self._visible = visible
        self._devices = tuple(devices)
        self._pool: GraphPool[Any] = GraphPool(module.graph_pool_handle)
        self._capture_streams: dict[int, Any] = {}
        self._taken_before: dict[int, int] = {}

    def devices(self) -> Sequence[DeviceInfo]:
        return self._devices

    def device(self, index: int) -> torch.device:
        if not 0 <= index < len(self._devices):
            raise DeviceError(
                f"{self._name} has {len(self._devices)} devices here, device {index} was asked "
                f"for; see {self._visible}"
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
        # Drivers report what all processes have taken together: what was taken when this one came
        # to the device is others' (and this one's context, which is there by then).
        device, info = self.device(index), self.memory_info(index)
        reserved = self._module.memory_reserved(device)
        returned = self._module.max_memory_reserved(device) - reserved
        taken = int(info.total_bytes - info.free_bytes + returned)
        return max(taken - self._taken_before.get(index, 0), 0)

    def event(self, index: int) -> Event:
        return AcceleratorEvent(self._module, self.device(index))

    def copy_stream(self, index: int) -> CopyStream:
        return AcceleratorCopyStream(self._module, self.device(index))

    def run_captured(
        self, run: Callable[[], None], capture: Callable[[Any, Any], AbstractContextManager[Any]]
    ) -> None:
        """Run once, which compiles kernels and fills the libraries' caches, then once captured.

        Other threads may go on using the device meanwhile. All graphs share one pool of memory:
        what a graph has computed is lost when another one is replayed.

        Args:
            run: what is captured.
            capture: given the pool and the stream, what captures in a ``with`` block.
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
        """A graph was captured; the pool lives as long as one of them."""
        self._pool.add(graph)

    def _capture_stream(self) -> Any:
        """The one stream of the current device on which everything is captured.

        Torch keeps a workspace for the matrix library per stream that has run a product, tens of
        megabytes each, and never gives it back. It hands streams out of a pool of 32: a new one for
        each capture would hold a gigabyte, taken after the memory for KV was measured.
        """
        index = self._module.current_device()
        if index not in self._capture_streams:
            self._capture_streams[index] = self._module.Stream()
        return self._capture_streams[index]
