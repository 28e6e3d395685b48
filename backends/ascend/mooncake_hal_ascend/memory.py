"""KV memory as HCCS registers it: beginning at a 2 MiB boundary, one region for a whole pool.

The vendor's engines take at most 256 regions per process: a pool of any number of layers is one.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mooncake_hal.allocation import TensorAllocation
from mooncake_hal.errors import DeviceError, OutOfMemory
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_ascend.runtime import AscendRuntime, npu


class AscendMemory:
    """See ``Memory``.

    Args:
        runtime: knows the devices.
        alignment: bytes at whose multiples an allocation begins.
    """

    def __init__(self, runtime: AscendRuntime, alignment: int) -> None:
        self._runtime = runtime
        self._alignment = alignment
        self._allocations: WeakValueDictionary[int, TensorAllocation] = WeakValueDictionary()

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        """See ``Memory``."""
        device = self._runtime.device(index)
        if nbytes <= 0:
            raise DeviceError(f"an allocation needs at least one byte, {nbytes} were asked for")
        info = self._runtime.memory_info(index)
        try:
            # torch-npu's allocator aligns to 512 bytes
            raw = torch.zeros(nbytes + self._alignment, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory(
                f"{nbytes} bytes were asked for, {info.free_bytes} of {info.total_bytes} bytes are "
                f"free on npu:{index}; use fewer KV blocks or free memory of this device"
            ) from exc
        skipped = -raw.data_ptr() % self._alignment
        tensor = raw[skipped : skipped + nbytes]
        self._runtime.synchronize(index)  # other streams, and peers, may use it at once
        region = MemoryRegion(tensor.data_ptr(), nbytes, f"npu:{index}")
        made = TensorAllocation(region, tensor, npu.empty_cache)
        self._allocations[region.address] = made
        return made

    def tensor_at(self, address: int) -> Tensor | None:
        """All of the allocation that begins at an address; None if none does."""
        found = self._allocations.get(address)
        return None if found is None else found.tensor
