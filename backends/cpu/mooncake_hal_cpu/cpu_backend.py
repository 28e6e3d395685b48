"""The CPU backend: assembles ops, runtime, memory and gloo collectives."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast
from urllib.parse import urlparse

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import Capabilities, Communicator, Exchange, GroupSpec
from mooncake_hal.collectives import GroupCommunicator, GroupFactory, ProcessGroup, is_of_one_host
from mooncake_hal.hal_env import gloo_interfaces
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal_cpu.cpu_device import CpuMemory, CpuRuntime
from mooncake_hal_cpu.cpu_ops import NativeOps, cpu_ops
from mooncake_hal_cpu.op_replay import record_call, refuse_capture


class GlooCommunicator(GroupCommunicator):
    """One rank of a gloo group."""

    def __init__(self, group: GroupSpec, generation: int) -> None:
        super().__init__(group, generation, _join)

    def start_all_to_all(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]
    ) -> Exchange:
        refuse_capture("an all-to-all")
        return super().start_all_to_all(x, send_rows, recv_rows)

    def _run(self, name: str, start: Callable[[ProcessGroup], dist.Work]) -> None:
        record_call(super()._run, name, start)


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._timeout = timedelta(seconds=group.timeout_s)
    interfaces = [] if is_of_one_host(group) else gloo_interfaces()
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
        gloo.create_device(hostname=own_address(group))
    ]
    return cast(ProcessGroup, gloo(store, group.rank, group.world_size, options))


def own_address(group: GroupSpec) -> str:
    """The address of this host in the network of the group's rendezvous. By default gloo advertises
    the one to which the host's name resolves, which on many hosts is a loopback address."""
    if is_of_one_host(group):
        return "127.0.0.1"
    meeting = urlparse(group.init_method)
    family, kind, *_, address = socket.getaddrinfo(
        meeting.hostname, meeting.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, but chooses the route
        return str(probe.getsockname()[0])


# no float16: current CPUs don't multiply it natively, which makes it slower than both other types
DTYPES = ("bfloat16", "float32")
BLOCK_SIZES = (16, 32, 64, 128, 8, 256, 4)
TRANSPORTS = ("shm", "rdma", "tcp", "staged")
KV_DTYPES = ("float8_e4m3fn",)
ROUNDING = (
    ("attention shares", "float32; to bfloat16 in prefills, where there are instructions for it"),
)


class CpuBackend:
    """The ``Backend`` of the host's own processors."""

    name = "cpu"

    def __init__(self) -> None:
        self.ops = cpu_ops()
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            block_sizes=BLOCK_SIZES,
            kv_layouts=tuple(KV_LAYOUTS),
            graphs=isinstance(self.ops, NativeOps),
            # graphs share no memory, and in larger steps the overhead of Python is small
            max_decodes_per_graph=32,
            moe_graphs=False,  # the host reads the number of tokens per expert
            transports=TRANSPORTS,
            kv_dtypes=KV_DTYPES,
            rounding=ROUNDING,
        )
        self.runtime = CpuRuntime()
        self.memory = CpuMemory()
        self._groups = GroupFactory(GlooCommunicator)

    def communicator(self, group: GroupSpec) -> Communicator:
        """Join a group; raises DeviceError if it does not form within its timeout."""
        return self._groups.join(group)
