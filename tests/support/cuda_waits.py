"""What a stretch of work waits for on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WAIT = "called a synchronizing CUDA operation"


@contextmanager
def watched() -> Iterator[list[str]]:
    """Fill a list, at the end of the block, with the waits for the device that torch has seen.

    It sees copies that block, reads of results and streams that are waited for; not events.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which says first that it is a prototype
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(warning.message) for warning in seen if _WAIT in str(warning.message)]
