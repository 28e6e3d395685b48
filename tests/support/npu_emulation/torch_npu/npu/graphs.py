"""``torch.npu.NPUGraph``: records captured ops and runs them again at each replay.

As on a device, captured ops have no effect during the capture: their writes are undone afterwards,
and their outputs are poison until the first replay. Ops that would wait for the device, or read
host memory that is not page-locked, are rejected.

A replay of updated ops counts as running until the host has waited for it: for the device, or for
an event that was recorded behind it. A device may take that long, although ops finish at once here.
Other waits, such as a copy to the host, don't count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPDATED = {
    "npu::npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu::npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
"""Ops whose host lists ``NPUGraph.update`` may change, and the lists: torch-npu's handlers."""

_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
_capturing: list[_Recorder] = []


@dataclass
class _Recorded:
    """A recorded op.

    Args:
        function, args, kwargs: the call.
        outputs: the tensors that it returned; a replay writes into them.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]

    def run(self) -> None:
        made = tree_leaves(self.function(*self.args, **self.kwargs))
        tensors = [each for each in made if isinstance(each, Tensor)]
        for kept, fresh in zip(self.outputs, tensors, strict=True):
            if kept is not fresh and kept.data_ptr() != fresh.data_ptr():
                kept.copy_(fresh)


@dataclass
class _Called:
    """A call other than an op that a replay makes between the ops, such as a collective."""

    call: Callable[[], object]

    def run(self) -> None:
        self.call()


class _Recorder(TorchDispatchMode):
    """Records the ops of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Recorded | _Called] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._fresh: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._require_capturable(function, args, kwargs)
        self._remember(function, args, kwargs)
        made = function(*args, **kwargs)
        outputs = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.ops.append(_Recorded(function, args, dict(kwargs), outputs))
        if not any(item.alias_info for item in function._schema.returns):
            self._fresh += outputs
        return made

    def _require_capturable(self, function: Any, args: Any, kwargs: Any) -> None:
        if function._schema.name in _WAITING:
            raise RuntimeError(f"{function._schema.name} waits for the device during capture")
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and _is_pageable(each):
                raise RuntimeError(f"{function._schema.name} reads the host during capture")

    def _remember(self, function: Any, args: Any, kwargs: Any) -> None:
        """Save the memory that the op is going to overwrite."""
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                self._keep(value)
        for argument in function._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write and argument.name in kwargs:
                self._keep(kwargs[argument.name])

    def _keep(self, value: Any) -> None:
        for each in tree_leaves(value):
            storage = each.untyped_storage()
            if storage.data_ptr() not in self._before:
                whole = torch.empty(0, dtype=torch.uint8, device=each.device).set_(storage)
                self._before[storage.data_ptr()] = (whole, whole.clone())

    def undo(self) -> None:
        """Restore overwritten memory, and poison outputs."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for each in self._fresh:
            if each.numel() and each.is_contiguous():
                each.view(torch.uint8).fill_(0xFF) if each.dim() else each.fill_(-1)


def _is_pageable(tensor: Tensor) -> bool:
    """Whether it is host memory that a device can't read directly; scalars are passed by value."""
    return tensor.device.type == "cpu" and tensor.dim() > 0 and not tensor.is_pinned()


@dataclass(eq=False)
class Replay:
    """A replay of updated ops.

    Args:
        device, stream: where it was enqueued.
        is_running: whether the host has not waited for it yet.
    """

    device: int
    stream: int
    is_running: bool = True


_replays: list[Replay] = []


def running_replays(device: int, stream: int | None = None) -> list[Replay]:
    """Those of a device, or of one of its streams."""
    _replays[:] = [each for each in _replays if each.is_running]
    return [each for each in _replays if each.device == device and stream in (None, each.stream)]


class NPUGraph:
    """See torch_npu.npu.NPUGraph."""

    def __init__(self) -> None:
        self._ops: list[_Recorded | _Called] = []
        self.auto_dispatch_capture = False
        self._is_updated = False
        self._last_replay: Replay | None = None

    @torch.no_grad()
    def replay(self) -> None:
        """Run the ops. On a device, the stream waits before each updated op for its update."""
        if self.auto_dispatch_capture and self._updated_ops() and not self._is_updated:
            raise RuntimeError("the replay would wait for ever: the graph was not updated")
        self._is_updated = False
        for op in self._ops:
            op.run()
        if self._updated_ops():
            stream = torch.accelerator.current_stream()
            self._last_replay = Replay(stream.device_index, stream.stream_id)
            _replays.append(self._last_replay)

    def _updated_ops(self) -> list[_Recorded]:
        ops = [op for op in self._ops if isinstance(op, _Recorded)]
        return [op for op in ops if op.function._schema.name in UPDATED]

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Change host lists of captured attention ops; one dict for all ops, or one for each."""
        if not self.auto_dispatch_capture:
            raise RuntimeError("The current graph configuration does not support update")
        if self._last_replay is not None and self._last_replay.is_running:
            raise RuntimeError("the graph is updated while its last replay may still run")
        wanted = self._updated_ops()
        inputs = cpu_update_input * len(wanted) if len(cpu_update_input) == 1 else cpu_update_input
        if len(inputs) != len(wanted):
            raise RuntimeError(f"{len(wanted)} operators are updated, {len(inputs)} inputs came")
        for op, values in zip(wanted, inputs, strict=True):
            for name in UPDATED[op.function._schema.name]:
                if name in values:
                    op.kwargs[name] = values[name]
        self._is_updated = True


class graph:  # torch_npu's name
    """See torch_npu.npu.graph."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"unknown capture_error_mode {capture_error_mode!r}")
        npu_graph.auto_dispatch_capture = auto_dispatch_capture
        if pool is not None:
            _pools[pool[1]].take(npu_graph)
        self._graph = npu_graph
        self._recorder = _Recorder()

    def __enter__(self) -> None:
        _capturing.append(self._recorder)
        self._recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)
        _capturing.pop()
        self._recorder.undo()
        self._graph._ops = self._recorder.ops


def defer(call: Callable[[], object]) -> bool:
    """If a capture is in progress, defer a call to the replays; returns whether one is."""
    if _capturing:
        _capturing[-1].ops.append(_Called(call))
    return bool(_capturing)


class _Pool:
    """The lifetime of a pool; the emulated device's graphs don't share memory."""

    def __init__(self) -> None:
        self._graphs: WeakSet[NPUGraph] = WeakSet()
        self._is_used = False

    def take(self, graph: NPUGraph) -> None:
        """Add a graph. As in torch's allocator, a pool ends with its last graph."""
        if self._is_used and not self._graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool has ended")
        self._is_used = True
        self._graphs.add(graph)


_pools: list[_Pool] = []


def graph_pool_handle() -> tuple[int, int]:
    """The handle of a new pool."""
    _pools.append(_Pool())
    return (0, len(_pools) - 1)


def is_current_stream_capturing() -> bool:
    return bool(_capturing)
