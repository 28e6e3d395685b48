"""A little NPU memory for the tokens by which two engines prove that they reach each other.

All of it is one region to the engine, which takes few, and links that are up know no new ones.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from mooncake_hal.backend import Allocation
from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_ascend.hccs.settings import NAME

ARENA_BYTES = 2 << 20
SLOT_BYTES = 512
"""The NPU's own grain; a token is shorter."""


class ArenaScratch:
    """See ``Scratch``: one slot of an arena.

    Args:
        address: the slot's first byte.
        slot: the slot, a flat uint8 tensor of the NPU.
    """

    def __init__(self, address: int, slot: Tensor) -> None:
        self._address = address
        self._slot = slot

    @property
    def address(self) -> int:
        """See ``Scratch``."""
        return self._address

    def put(self, content: bytes) -> None:
        """See ``Scratch``."""
        held = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        self._slot.copy_(held)

    def get(self) -> bytes:
        """See ``Scratch``."""
        return self._slot.cpu().numpy().tobytes()


class Arena:
    """The slots of one allocation.

    Args:
        memory: from the backend, aligned as its transports need it; freed with the arena.
        nbytes: how much of its beginning is slots; the rest is somebody else's.
    """

    def __init__(self, memory: Allocation, nbytes: int) -> None:
        self._memory = memory
        self._free = list(range(nbytes // SLOT_BYTES))
        self._lock = threading.Lock()

    @property
    def region(self) -> MemoryRegion:
        """All of it."""
        return self._memory.region

    def scratch(self, nbytes: int) -> ArenaScratch:
        """Take a slot; it is free again when the scratch is dropped.

        Raises:
            TransportUnavailable: all are taken.
        """
        with self._lock:
            if not self._free or nbytes > SLOT_BYTES:
                raise TransportUnavailable(NAME, "there is no NPU memory left for tokens")
            slot = self._free.pop()
        at = slot * SLOT_BYTES
        taken = ArenaScratch(self.region.address + at, self._memory.tensor[at : at + nbytes])
        weakref.finalize(taken, self._free.append, slot)
        return taken

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.free()
