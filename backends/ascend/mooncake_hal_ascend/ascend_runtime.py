"""The runtime of the Ascend backend: devices, threads, events and graphs, through torch-npu."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch_npu

from mooncake_hal.accelerator import AcceleratorRuntime
from mooncake_hal.backend import DeviceInfo, Graph
from mooncake_hal.errors import DeviceError
from mooncake_hal_ascend.soc import Soc, find_soc

npu: Any = torch_npu.npu
_CONTEXT_LENS = ("actual_seq_lengths_kv", "actual_seq_kvlen")
"""Parameter names of the sequences' KV lengths, in versions 1 and 2 of the attention op."""


class AclGraph:
    """A captured graph; it owns the memory that its kernels use.

    Attention ops take lengths as host lists, which are captured with the graph. Each replay updates
    them, and the graph waits for the update.

    torch-npu updates on a stream of its own, which waits for no replay. With async scheduling the
    last replay may still run by then: its later layers would get the new lengths, and the signal of
    an update that comes early is reset by them, so that the next replay would wait for ever. So the
    host waits for the last replay first.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._replayed: Any = None

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        lengths = list(host_context_lens)
        if not lengths:  # no attention was captured: nothing to update, and no reason to wait
            self._graph.replay()
            return
        if self._replayed is None:
            self._replayed = npu.Event()
        else:
            self._replayed.synchronize()
        self._graph.update(cpu_update_input=[{name: lengths for name in _CONTEXT_LENS}])
        self._graph.replay()
        self._replayed.record()


class AscendRuntime(AcceleratorRuntime):
    """The NPUs that ASCEND_RT_VISIBLE_DEVICES exposes, all of one family.

    Raises:
        BackendUnavailable: this backend does not support their family.
    """

    def __init__(self) -> None:
        count = npu.device_count()
        self._soc = find_soc(npu.get_soc_version(), npu.get_device_name(0)) if count else None
        devices = [self._describe(index) for index in range(count)]
        super().__init__("ascend", npu, "npu", "ASCEND_RT_VISIBLE_DEVICES", devices)

    @property
    def soc(self) -> Soc:
        """The devices' family; raises DeviceError if there are no devices."""
        if self._soc is None:
            raise DeviceError("ascend has no devices here; see ASCEND_RT_VISIBLE_DEVICES")
        return self._soc

    def capture(self, run: Callable[[], None]) -> Graph:
        graph = npu.NPUGraph()
        mode = {"auto_dispatch_capture": True, "capture_error_mode": "thread_local"}
        self.run_captured(run, lambda pool, stream: npu.graph(graph, pool, stream, **mode))
        captured = AclGraph(graph)
        self.keep_in_pool(captured)
        return captured

    def _describe(self, index: int) -> DeviceInfo:
        found = npu.get_device_properties(index)
        return DeviceInfo(index, found.name, self.soc.generation, found.total_memory)


class NpuSideStream:
    """Streams for copies that run concurrently with the model: one per device, created on first
    use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        npu.set_device(device)
        with npu.stream(self._stream(device)):
            work()
            done = npu.Event()
            done.record()
        return cast("Callable[[], None]", done.synchronize)

    def _stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = npu.Stream(device)
            return self._streams[device]
