"""Copies what lies packed in a buffer to its places in a region, by a kernel of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mooncake_hal_ascend.hccs.runs import U64, row_bytes, rows_of

ELEMENT = torch.int32
"""Of ELEMENT_BYTES."""

TensorAt = Callable[[int], "Tensor | None"]
"""The tensor, flat uint8, of the backend's allocation that begins at an address."""

Wait = Callable[[], None]


class SideStream(Protocol):
    """Where copies run that wait for nothing that the model computes, nor it for them."""

    def run(self, work: Callable[[], None], device: torch.device) -> Wait:
        """Enqueue what ``work`` does; returns what waits until it is done."""
        ...


class Spreader:
    """Spreads buffers over the backend's memory. Any thread.

    Args:
        tensor_at: finds that memory.
        stream: of the copies.
    """

    def __init__(self, tensor_at: TensorAt, stream: SideStream) -> None:
        self._tensor_at = tensor_at
        self._stream = stream

    def takes(self, address: int) -> bool:
        """Whether a region that begins at ``address`` can be spread over."""
        return self._tensor_at(address) is not None

    def spread(self, buffer: Tensor, places: U64, sizes: U64, base: int) -> Wait:
        """Begin to copy pieces to their places.

        Args:
            buffer: flat uint8, the pieces one behind the other.
            places, sizes: [n] of the pieces, in rows as ``is_row`` has them.
            base: first byte of the region that they lie in; ``takes`` holds for it.

        Returns:
            What waits until all are there; the buffer must not change before that.
        """
        region = self._tensor_at(base)
        assert region is not None, "takes() was not asked"
        row = row_bytes(places, sizes, base)
        target = _rows(region, row)
        packed = _rows(buffer, row)[: int(sizes.sum()) // row]
        rows = torch.from_numpy(rows_of(places, sizes, base, row))

        def copy() -> None:
            target.index_copy_(0, rows.to(target.device), packed)

        return self._stream.run(copy, target.device)


def _rows(memory: Tensor, row: int) -> Tensor:
    """Flat uint8 as rows: [n, row / 4] int32."""
    whole = memory.numel() // row * row
    return memory[:whole].view(ELEMENT).view(-1, row // ELEMENT.itemsize)
