"""What a stretch of work would wait for on an NPU: the emulated one does all at once, and notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def watched() -> Iterator[list[str]]:
    """Fill a list, at the end of the block, with what this thread would have waited for: copies
    between host and device that block or whose end on the host is pageable, reads of numbers, and
    indices that lie on the host."""
    found: list[str] = []
    torch.ops.npu_emulation.watch_waits(True)
    try:
        yield found
    finally:
        found += torch.ops.npu_emulation.watch_waits(False)
