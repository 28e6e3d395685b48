"""Runs ranks as concurrent processes, each a module's function with its arguments."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def at_once(ranks: Sequence[Callable[[], Result]], timeout_s: float = 120.0) -> list[Result]:
    """Each rank's result; raises a rank's error here."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(ranks), spawn) as processes:
        running = [processes.submit(rank) for rank in ranks]
        return [rank.result(timeout_s) for rank in running]
