"""A backend's parts. Start with the reference ops, and replace them with kernels one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import (
    Capabilities,
    Communicator,
    DeviceInfo,
    Graph,
    GroupSpec,
    MemoryInfo,
)
from mooncake_hal.backend_parts import (
    SingleRankCommunicator,
    SynchronousRuntime,
)
from mooncake_hal.errors import CapabilityError
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.reference import ReferenceOps
from mooncake_hal_mychip.mychip_memory import TOTAL_BYTES, MyChipMemory


class MyChipRuntime(SynchronousRuntime):
    """One device. The inherited methods simulate it on the host; a real backend overrides them:
    ``torch.device("mychip", index)``, ``torch.mychip.set_device(index)``, events of its streams."""

    def __init__(self) -> None:
        super().__init__("mychip")

    def devices(self) -> Sequence[DeviceInfo]:
        return (DeviceInfo(0, "My Chip 100", "gen1", TOTAL_BYTES),)

    def memory_info(self, index: int) -> MemoryInfo:
        self.require_device(index)
        return MemoryInfo(TOTAL_BYTES, TOTAL_BYTES)

    def reset_peak(self, index: int) -> None:
        self.require_device(index)  # a real chip: torch.mychip.reset_peak_memory_stats(index)

    def peak_bytes(self, index: int) -> int:
        self.require_device(index)
        # Only a host may say 0. A real chip: torch.mychip.max_memory_reserved(index), or weights
        # and activations count as nothing, and KV takes the whole memory.
        return 0

    def capture(self, run: Callable[[], None]) -> Graph:
        raise CapabilityError("mychip has no graphs; run without graph capture")


class MyChipOps(ReferenceOps):
    """The reference ops, overridden by the kernels that exist so far."""

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return (functional.silu(gate.float()) * up.float()).to(x.dtype)


class MyChipBackend:
    """Combines the parts, and declares their capabilities."""

    name = "mychip"

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            dtypes=("bfloat16", "float32"),
            block_sizes=(16, 32, 64, 128),
            kv_layouts=tuple(KV_LAYOUTS),
            graphs=False,
            transports=("staged",),
            rounding=(("attention shares", "float32"),),
        )
        self.runtime = MyChipRuntime()
        self.ops = MyChipOps()
        self.memory = MyChipMemory()

    def communicator(self, group: GroupSpec) -> Communicator:
        """A communicator of one rank, until the chip has a collectives library."""
        if group.world_size != 1:
            raise CapabilityError(f"mychip runs on one rank, {group.world_size} were asked for")
        return SingleRankCommunicator()
