"""Records where code would wait for an NPU; the emulated NPU runs everything synchronously."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list that gets, at the end of the block, this thread's potential waits: copies
    between host and device that block or use pageable host memory, reads of values, and indices in
    host memory."""
    found: list[str] = []
    torch.ops.npu_emulation.watch_waits(True)
    try:
        yield found
    finally:
        found += torch.ops.npu_emulation.watch_waits(False)
