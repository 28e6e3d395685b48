"""Records where code waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WAIT = "called a synchronizing CUDA operation"


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list that gets, at the end of the block, the waits that torch has detected.

    Torch detects blocking copies, reads of results and stream synchronisation, but not events.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # torch warns first that this mode is a prototype
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(warning.message) for warning in seen if _WAIT in str(warning.message)]
