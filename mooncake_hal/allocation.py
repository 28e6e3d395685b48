"""What a backend's KV memory is: one tensor, its region, and a way to give it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake_hal.errors import DeviceError
from mooncake_hal.transport import MemoryRegion

if TYPE_CHECKING:
    from torch import Tensor


class TensorAllocation:
    """See ``Allocation``.

    Args:
        region: where it lies.
        tensor: all of it, flat uint8.
        release: gives the memory back; None if it goes with the tensor.
    """

    def __init__(
        self, region: MemoryRegion, tensor: Tensor, release: Callable[[], object] | None = None
    ) -> None:
        self._region = region
        self._tensor: Tensor | None = tensor
        self._release = release

    @property
    def region(self) -> MemoryRegion:
        """See ``Allocation``."""
        return self._region

    @property
    def tensor(self) -> Tensor:
        """See ``Allocation``; raises DeviceError once it is freed."""
        if self._tensor is None:
            raise DeviceError(f"this allocation of {self._region.nbytes} bytes has been freed")
        return self._tensor

    def free(self) -> None:
        """See ``Allocation``."""
        if self._tensor is None:
            return
        self._tensor = None
        if self._release is not None:
            self._release()
