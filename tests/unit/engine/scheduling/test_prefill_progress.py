"""What a connector is told of a prompt whose KV leaves as it is computed."""

from __future__ import annotations

import pytest
from support.scheduling import Bench

PROMPT = tuple(range(20))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_completed_chunk_but_the_last_is_told(depth: int) -> None:
    """Never one that is planned, or in flight: a peer reads at any time."""
    bench = Bench(max_num_batched_tokens=8, depth=depth, uses_async_scheduling=depth > 1)
    request = bench.add("r", PROMPT, sends_kv=True)
    told = []
    while bench.scheduler.has_work:
        bench.step()
        told.append([num_tokens for _, num_tokens, _ in bench.connector.advanced.get("r", [])])
    assert told[-1] == [8, 16]
    assert all(len(told[index]) <= index + 2 - depth for index in range(len(told)))
    assert bench.connector.offered["r"] == bench.connector.advanced["r"][-1][2]
    assert not request.block_ids, "they are the connector's"


def test_a_request_that_keeps_its_kv_to_be_fetched_later_is_not_told_of() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("r", PROMPT, keeps_kv=True)
    bench.run()
    assert bench.connector.advanced == {}


def test_a_preempted_prompt_is_told_of_as_another_attempt() -> None:
    bench = Bench(num_blocks=8, max_num_batched_tokens=3, prefix_caching=False)
    older = bench.add("older", PROMPT[:8], max_tokens=12)
    while not older.num_output_tokens:
        bench.step()
    bench.add("r", PROMPT[:18], arrival=1.0, sends_kv=True)
    while "r" not in bench.connector.offered:
        bench.step()
    bench.scheduler.release("r")
    bench.run()
    attempts = [attempt for attempt, _, _ in bench.connector.advanced["r"]]
    assert attempts == sorted(attempts)
    assert set(attempts) == {0, 1}
