"""Devices, threads, events and graphs, through torch-npu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_npu

from mooncake_hal.backend import DeviceInfo, Event, Graph, MemoryInfo
from mooncake_hal.errors import DeviceError
from mooncake_hal.graph_pool import GraphPool
from mooncake_hal_ascend.soc import Soc, find_soc

npu: Any = torch_npu.npu
_CONTEXT_LENS = ("actual_seq_lengths_kv", "actual_seq_kvlen")
"""What the attention ops, version 1 and 2, call the sequences' KV lengths."""


class AscendEvent:
    """An event without timing.

    Args:
        device: whose stream it marks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = npu.Event()

    def record(self) -> None:
        """See ``Event``."""
        self._event.record(npu.current_stream(self._device))

    def query(self) -> bool:
        """See ``Event``."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """See ``Event``."""
        self._event.synchronize()


class AclGraph:
    """A captured graph; it keeps the memory that its work uses.

    Attention ops take lengths from host lists, which are part of what was captured: each replay
    waits, inside the graph, until they have been given anew.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        """See ``Graph``."""
        lengths = list(host_context_lens)
        given = {name: lengths for name in _CONTEXT_LENS} if lengths else {}
        self._graph.update(cpu_update_input=[given])
        self._graph.replay()


class AscendRuntime:
    """The NPUs that ASCEND_RT_VISIBLE_DEVICES shows, all of one family.

    Raises:
        BackendUnavailable: they are of a family that this backend does not run on.
    """

    def __init__(self) -> None:
        count = npu.device_count()
        self._soc = find_soc(npu.get_soc_version(), npu.get_device_name(0)) if count else None
        self._devices = tuple(self._describe(index) for index in range(count))
        self._pool: GraphPool[object] = GraphPool(npu.graph_pool_handle)

    @property
    def soc(self) -> Soc:
        """What the devices are; raises DeviceError where there are none."""
        if self._soc is None:
            raise DeviceError("ascend has no devices here; see ASCEND_RT_VISIBLE_DEVICES")
        return self._soc

    def devices(self) -> Sequence[DeviceInfo]:
        """See ``Runtime``."""
        return self._devices

    def device(self, index: int) -> torch.device:
        """See ``Runtime``."""
        if not 0 <= index < len(self._devices):
            raise DeviceError(
                f"ascend has {len(self._devices)} devices here, device {index} was asked for; see "
                "ASCEND_RT_VISIBLE_DEVICES"
            )
        return torch.device("npu", index)

    def bind_thread(self, index: int) -> None:
        """See ``Runtime``."""
        npu.set_device(self.device(index))

    def synchronize(self, index: int) -> None:
        """See ``Runtime``."""
        try:
            npu.synchronize(self.device(index))
        except RuntimeError as exc:
            raise DeviceError(f"npu:{index} failed: {exc}") from exc

    def memory_info(self, index: int) -> MemoryInfo:
        """See ``Runtime``."""
        return MemoryInfo(*npu.mem_get_info(self.device(index)))

    def reset_peak(self, index: int) -> None:
        """See ``Runtime``."""
        npu.empty_cache()
        npu.reset_peak_memory_stats(self.device(index))

    def peak_bytes(self, index: int) -> int:
        """See ``Runtime``: of all processes that use the device, since the driver tells no more."""
        device, info = self.device(index), self.memory_info(index)
        returned = npu.max_memory_reserved(device) - npu.memory_reserved(device)
        return int(info.total_bytes - info.free_bytes + returned)

    def event(self, index: int) -> Event:
        """See ``Runtime``."""
        return AscendEvent(self.device(index))

    def capture(self, run: Callable[[], None]) -> Graph:
        """See ``Runtime``. The run that comes before compiles ops and fills caches.

        Other threads may go on using the device meanwhile. All graphs share one pool of memory:
        what a graph has computed is lost when another one is replayed.
        """
        current, side = npu.current_stream(), npu.Stream()
        side.wait_stream(current)
        with npu.stream(side):
            run()
        current.wait_stream(side)
        graph = npu.NPUGraph()
        mode = {"auto_dispatch_capture": True, "capture_error_mode": "thread_local"}
        with npu.graph(graph, pool=self._pool.handle(), **mode):
            run()
        captured = AclGraph(graph)
        self._pool.add(captured)
        return captured

    def _describe(self, index: int) -> DeviceInfo:
        facts = npu.get_device_properties(index)
        return DeviceInfo(index, facts.name, self.soc.generation, facts.total_memory)
