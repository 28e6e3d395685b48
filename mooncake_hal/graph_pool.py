"""Memory that all of a process's graphs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakSet

Handle = TypeVar("Handle")


class GraphPool(Generic[Handle]):
    """One pool for graphs that never run at once.

    torch ends a pool with the last graph that was captured in it, and refuses its handle from then
    on.

    Args:
        make_handle: of a new pool.
    """

    def __init__(self, make_handle: Callable[[], Handle]) -> None:
        self._make_handle = make_handle
        self._handle: Handle | None = None
        self._graphs: WeakSet[object] = WeakSet()

    def handle(self) -> Handle:
        """Where to capture the next graph."""
        if self._handle is None or not self._graphs:
            self._handle = self._make_handle()
        return self._handle

    def add(self, graph: object) -> None:
        """A graph was captured in it; the pool lives as long as one of them."""
        self._graphs.add(graph)
