"""A graph memory pool lives as long as any graph in it."""

from __future__ import annotations

from itertools import count

from mooncake_hal.backend_parts import GraphPool


class Graph:
    """A graph that can be garbage-collected."""


def test_graphs_share_a_pool_until_the_last_is_deleted() -> None:
    numbers = count(1)
    pool = GraphPool(lambda: next(numbers))
    first, second = Graph(), Graph()
    for graph in (first, second):
        assert pool.handle() == 1
        pool.add(graph)
    del first
    assert pool.handle() == 1
    del second, graph
    assert pool.handle() == 2


def test_failed_capture_gets_a_new_pool() -> None:
    numbers = count(1)
    pool = GraphPool(lambda: next(numbers))
    assert [pool.handle(), pool.handle()] == [1, 2]
