"""A pool of graphs' memory lives as long as one of them."""

from __future__ import annotations

from itertools import count

from mooncake_hal.backend_parts import GraphPool


class Graph:
    """Something that may be gone."""


def test_graphs_share_a_pool_until_the_last_is_gone() -> None:
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


def test_a_capture_that_failed_leaves_a_new_pool() -> None:
    numbers = count(1)
    pool = GraphPool(lambda: next(numbers))
    assert [pool.handle(), pool.handle()] == [1, 2]
