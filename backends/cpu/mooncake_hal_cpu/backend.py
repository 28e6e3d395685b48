"""The CPU backend: its parts put together."""

from __future__ import annotations

from mooncake_hal.backend import Capabilities, Communicator, GroupSpec
from mooncake_hal.collectives import GroupFactory
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal_cpu.communicator import GlooCommunicator
from mooncake_hal_cpu.memory import CpuMemory
from mooncake_hal_cpu.ops import NativeOps, cpu_ops
from mooncake_hal_cpu.runtime import CpuRuntime

# float16 stays out: no CPU of today multiplies it natively, so it is slower than both others
DTYPES = ("bfloat16", "float32")
BLOCK_SIZES = (16, 32, 64, 128, 8, 256, 4)
TRANSPORTS = ("shm", "tcp", "rdma")
KV_DTYPES = ("float8_e4m3fn",)


class CpuBackend:
    """Everything about the machine's own processors."""

    name = "cpu"

    def __init__(self) -> None:
        self.ops = cpu_ops()
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            block_sizes=BLOCK_SIZES,
            kv_layouts=tuple(KV_LAYOUTS),
            graphs=isinstance(self.ops, NativeOps),
            transports=TRANSPORTS,
            kv_dtypes=KV_DTYPES,
        )
        self.runtime = CpuRuntime()
        self.memory = CpuMemory()
        self._groups = GroupFactory(GlooCommunicator)

    def communicator(self, group: GroupSpec) -> Communicator:
        """See ``Backend``. Raises DeviceError if the group does not form in time."""
        return self._groups.join(group)
