"""Step plans name each block that a peer has written once, before any step reads it."""

from __future__ import annotations

from support.scheduling import Bench

from mooncake_api.instance_protocol import BATCH_PRIORITY

PROMPT = list(range(10, 20))
"""Two full blocks of four tokens, and half of a third."""


def bench(**options: int) -> Bench:
    return Bench(8, reports_received_blocks=True, **options)


def test_loaded_blocks_are_named_in_the_step_that_reads_them() -> None:
    here = bench()
    here.add("d", PROMPT, first_token=5)
    assert here.step()[0].received_blocks == ()
    blocks = here.connector.tables["d"][0]
    here.end_load("d", None)
    plan, _ = here.step()
    assert plan.received_blocks == tuple(blocks)
    assert [each.request_id for each in plan.sequences] == ["d"]
    assert here.step()[0].received_blocks == ()


def test_locally_cached_blocks_are_not_named() -> None:
    here = bench()
    here.add("a", PROMPT[:8], max_tokens=1)
    here.run()
    here.add("d", PROMPT, first_token=5)
    here.step()
    blocks = here.connector.tables["d"][0]
    here.end_load("d", None)
    assert here.step()[0].received_blocks == tuple(blocks[2:])


def test_blocks_loaded_for_siblings_are_named_once() -> None:
    here = bench()
    for name in ("d", "e"):
        here.add(name, PROMPT, first_token=5, group="both")
    here.step()
    [leader] = here.connector.tables
    blocks = here.connector.tables[leader][0]
    here.end_load(leader, None)
    named = list(here.step()[0].received_blocks)
    for name in list(here.connector.loading):
        here.end_load(name, None)
    while here.scheduler.has_work:
        named += here.step()[0].received_blocks
    assert named == blocks


def test_blocks_of_a_failed_load_are_not_named() -> None:
    here = bench()
    here.add("d", PROMPT, first_token=5)
    here.step()
    here.end_load("d", "peer lost")
    plan, _ = here.step()
    assert plan.received_blocks == ()
    assert plan.sequences[0].start == 0


def test_released_unread_blocks_are_reused_by_the_next_load() -> None:
    here = bench()
    here.add("d", PROMPT, first_token=5)
    here.step()
    blocks = here.connector.tables["d"][0]
    here.end_load("d", None)
    here.scheduler.abort("d")
    here.add("e", list(range(50, 78)), first_token=5, max_tokens=2)
    here.step()
    taken, _ = here.connector.tables["e"]
    assert set(blocks) <= set(taken)
    here.end_load("e", None)
    plan, _ = here.step()
    assert sorted(plan.received_blocks) == sorted(taken)


def test_received_blocks_are_named_before_they_are_swapped_out() -> None:
    """Also in a step that runs nothing, because the swap makes room for an interactive request."""
    here = bench(num_host_blocks=8)
    for name in ("d", "e"):
        here.add(name, PROMPT, pulls_kv=True, group="both", priority=BATCH_PRIORITY)
    here.step()
    here.end_load("d", None)
    here.end_load("e", None)
    here.add("chat", list(range(50, 78)), max_tokens=1)
    plan, _ = here.step()
    assert plan.swap_outs
    assert not plan.sequences
    assert {block for block, _ in plan.swap_outs} == set(plan.received_blocks)
    assert here.run().keys() == {"d", "e", "chat"}


def test_no_load_starts_in_blocks_that_a_step_in_flight_converts() -> None:
    here = bench(depth=2, max_num_seqs=1, uses_async_scheduling=True)
    here.add("r", [1, 2], max_tokens=20)
    here.step()
    here.add("d", PROMPT, first_token=5)
    here.step()
    here.end_load("d", None)
    assert here.step()[0].received_blocks  # "d" itself waits for its turn
    here.scheduler.abort("d")
    here.add("e", PROMPT, first_token=5)
    here.step()
    assert "e" not in here.connector.loading
    here.step()
    assert "e" in here.connector.loading
