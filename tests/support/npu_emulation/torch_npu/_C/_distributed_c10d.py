"""The process group ``hccl`` of the emulated device: gloo on the same bytes, without a copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_npu.npu.graphs import defer

by_comm_name: dict[str, Any] = {}
"""Groups by the names that are passed to ops."""
_numbers = itertools.count()

_c10d = torch._C._distributed_c10d


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != "npu":
            raise RuntimeError(f"No backend type associated with device type {value.device.type}")
        return torch.ops.npu_emulation.as_cpu(value)
    return [_on_host(each) for each in value]


class ProcessGroupHCCL(dist.ProcessGroup):
    """The methods of torch_npu._C._distributed_c10d.ProcessGroupHCCL that are in use here.

    Args:
        store, rank, size: as for every process group.
        options: its ``_timeout`` bounds each collective.
    """

    class Options:
        """See ProcessGroupHCCL.Options."""

        def __init__(self) -> None:
            self._timeout = timedelta(minutes=30)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = options if isinstance(options, timedelta) else options._timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, gloo)

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        name = f"hccl_world_{next(_numbers)}_{rank}"
        by_comm_name[name] = self._gloo
        return name

    def getBackendName(self) -> str:  # torch's name
        return "hccl"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        chosen = options or _c10d.AllreduceOptions()
        return _start(lambda: self._gloo.allreduce(_on_host(tensors), chosen))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        chosen = options or _c10d.AllgatherOptions()
        return _start(lambda: self._gloo.allgather(_on_host(outputs), _on_host(inputs), chosen))

    def broadcast(self, tensor: Any, options: Any = None) -> Any:
        chosen = _c10d.BroadcastOptions()
        if isinstance(options, int):
            chosen.rootRank = options
        tensors = [tensor] if isinstance(tensor, Tensor) else tensor
        return _start(lambda: self._gloo.broadcast(_on_host(tensors), chosen))

    def alltoall_base(
        self, output: Any, given: Any, recv: list[int], send: list[int], options: Any = None
    ) -> Any:
        chosen = options or _c10d.AllToAllOptions()
        tensors = _on_host([output, given])
        return _start(lambda: self._gloo.alltoall_base(*tensors, recv, send, chosen))

    def barrier(self, options: Any = None) -> Any:
        return _start(lambda: self._gloo.barrier(_c10d.BarrierOptions()))

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        return _start(lambda: self._gloo.send(_on_host(tensors), target, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return _start(lambda: self._gloo.recv(_on_host(tensors), source, tag))


class _Deferred:
    """The work of a captured collective: each replay waits for its own."""

    def wait(self) -> bool:
        return True


def _start(call: Callable[[], dist.Work]) -> dist.Work | _Deferred:
    return _Deferred() if defer(lambda: call().wait()) else call()


dist.Backend.register_backend("hccl", ProcessGroupHCCL, devices=["npu"])
