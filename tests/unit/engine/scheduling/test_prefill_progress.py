"""Progress reports to the connector for a prompt whose KV is sent while it is computed."""

from __future__ import annotations

import pytest
from support.scheduling import Bench

PROMPT = tuple(range(20))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_completed_chunk_but_the_last_is_reported(depth: int) -> None:
    """Never a chunk that is planned or in flight: the peer may read it at once."""
    bench = Bench(max_num_batched_tokens=8, depth=depth, uses_async_scheduling=depth > 1)
    request = bench.add("r", PROMPT, sends_kv=True)
    reported = []
    while bench.scheduler.has_work:
        bench.step()
        reported.append([num_tokens for _, num_tokens, _ in bench.connector.advanced.get("r", [])])
    assert reported[-1] == [8, 16]
    assert all(len(reported[index]) <= index + 2 - depth for index in range(len(reported)))
    assert bench.connector.offered["r"] == bench.connector.advanced["r"][-1][2]
    assert not request.block_ids, "the connector owns the blocks"


def test_request_that_keeps_its_kv_has_no_progress_reports() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("r", PROMPT, keeps_kv=True)
    bench.run()
    assert bench.connector.advanced == {}


def test_preempted_prompt_is_reported_as_a_new_attempt() -> None:
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
