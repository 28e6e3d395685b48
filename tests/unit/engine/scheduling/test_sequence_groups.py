"""Sequence groups: the prompt is computed once, and its blocks are shared until written to."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduling import Bench, token_of

from mooncake_kv.params import FirstToken

PROMPT = list(range(10, 20))
"""Two full blocks of four, and half of a third."""


def endless(**options: Any) -> Bench:
    """A bench whose answers run to their length limit."""
    return Bench(token=None, eos_token_ids=frozenset(), **options)


def add_group(bench: Bench, count: int, prompt: list[int] = PROMPT, **options: Any) -> None:
    for index in range(count):
        bench.add(f"a{index}", prompt, group="g", **options)


def test_siblings_sample_from_the_logits_of_one_prompt() -> None:
    bench = endless()
    add_group(bench, 3)
    plan, updates = bench.step()
    assert [(s.request_id, s.count, s.siblings) for s in plan.sequences] == [
        ("a0", 10, ("a1", "a2"))
    ]
    assert [(u.request_id, u.token_ids) for u in updates] == [
        (name, (token_of(name, 0),)) for name in ("a0", "a1", "a2")
    ]
    assert bench.num_free == 16 - 3


def test_partial_block_is_copied_by_all_but_the_last_writer() -> None:
    bench = endless()
    add_group(bench, 3)
    bench.step()
    plan, _ = bench.step()
    tables = [r.block_ids for r in bench.scheduler._queues.requests.values()]
    assert len(plan.block_copies) == 2
    assert len({source for source, _ in plan.block_copies}) == 1
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert len({table[2] for table in tables}) == 3
    assert bench.num_free == 16 - 2 - 3


def test_prompt_of_full_blocks_needs_no_copy() -> None:
    bench = endless()
    add_group(bench, 3, PROMPT[:8])
    bench.step()
    plan, _ = bench.step()
    assert not plan.block_copies
    assert bench.num_free == 16 - 2 - 3


def test_siblings_wait_while_the_prompt_runs_in_chunks() -> None:
    bench = endless(max_num_batched_tokens=4)
    add_group(bench, 2)
    counts = [bench.step()[0].num_tokens for _ in range(3)]
    assert counts == [4, 4, 2]
    assert bench.scheduler.num_running == 2
    assert bench.worker.num_computed == len(PROMPT)


def test_sibling_added_during_the_prompt_joins() -> None:
    bench = endless(max_num_batched_tokens=4)
    add_group(bench, 1)
    bench.step()
    bench.add("late", PROMPT, group="g")
    bench.run()
    assert bench.worker.num_computed == len(PROMPT) + 2 * 7


def test_sibling_added_after_the_prompt_recomputes_its_last_token() -> None:
    bench = endless(prefix_caching=False)
    add_group(bench, 1)
    bench.step()
    bench.add("late", PROMPT, group="g")
    plan, _ = bench.step()
    late = next(s for s in plan.sequences if s.request_id == "late")
    assert (late.start, late.count) == (9, 1)
    assert len(plan.block_copies) == 1
    bench.run()


def test_sibling_added_while_a_shared_block_is_copied_gets_that_blocks_content() -> None:
    bench = endless()
    add_group(bench, 2)
    bench.step()
    bench.add("late", PROMPT, group="g")
    plan, _ = bench.step()  # the first two part, and the third forks from one of them
    sources, targets = zip(*plan.block_copies, strict=True)
    assert len(set(sources)) == 1
    assert len(set(targets)) == 2
    assert not set(sources).intersection(targets)


def test_siblings_beyond_max_num_seqs_join_later() -> None:
    bench = endless(max_num_seqs=2)
    add_group(bench, 5)
    plan, _ = bench.step()
    assert plan.sequences[0].siblings == ("a1",)
    answers = bench.run()
    for name in ("a2", "a3", "a4"):
        assert answers[name] == [token_of(name, i) for i in range(len(answers[name]))]


def test_next_sibling_computes_the_prompt_if_the_first_is_aborted() -> None:
    bench = endless(max_num_batched_tokens=4)
    add_group(bench, 3)
    bench.step()
    bench.scheduler.abort("a0")
    assert set(bench.run()) == {"a0", "a1", "a2"}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_group_gives_the_tokens_of_single_requests(count: int) -> None:
    together, alone = endless(), endless()
    add_group(together, count)
    for index in range(count):
        alone.add(f"a{index}", PROMPT)
    assert together.run() == alone.run()


def test_peer_may_fetch_the_prompt_for_every_sibling() -> None:
    bench = endless()
    add_group(bench, 2, keeps_kv=True)
    bench.step()
    assert bench.worker.num_computed == len(PROMPT)
    assert bench.connector.offered["a0"] == bench.connector.offered["a1"]
    bench.scheduler.release("a0")
    assert bench.num_free == 13
    bench.scheduler.release("a1")
    assert bench.num_free == 16


@pytest.mark.parametrize("pushes", [False, True])
def test_prompt_is_loaded_once_for_all_siblings(pushes: bool) -> None:
    bench = endless()
    names = [f"a{index}" for index in range(3)]
    for name in names:
        kind = {"receives_kv": True} if pushes else {}
        first = None if pushes else token_of(name, 0)
        bench.add(name, PROMPT, group="g", first_token=first, **kind)
    bench.step()
    assert bench.connector.loading == {"a0": 0}
    firsts = {name: FirstToken(token_of(name, 0)) if pushes else None for name in names}
    bench.end_load("a0", None, firsts["a0"])
    assert bench.connector.loading == {"a1": 10, "a2": 10}
    bench.step()
    for name in names[1:]:
        bench.end_load(name, None, firsts[name])
    bench.run()
    assert bench.worker.num_computed == 3 * 7
    assert bench.num_free == 16


def test_next_sibling_loads_if_the_first_load_fails() -> None:
    bench = endless()
    for index in range(2):
        bench.add(f"a{index}", PROMPT, group="g", first_token=token_of(f"a{index}", 0))
    bench.step()
    bench.end_load("a0", "peer lost")
    bench.step()
    bench.step()
    assert set(bench.connector.loading) <= {"a1"}
    for name in list(bench.connector.loading):
        bench.end_load(name, None)
    answers = bench.run()
    assert bench.num_free == 16
    assert set(answers) == {"a0", "a1"}


@pytest.mark.parametrize("depth", [1, 2], ids=["in turn", "ahead"])
def test_late_sibling_from_a_peer_never_writes_to_a_cached_block(depth: int) -> None:
    """The first choice has filled the prompt's last block with its own tokens, and ends before the
    late one writes its first token there."""
    bench = endless(depth=depth, uses_async_scheduling=depth > 1)
    first = bench.add("a", PROMPT, group="g", first_token=token_of("a", 0), max_tokens=20)
    bench.step()
    bench.end_load("a", None)
    while first.num_scheduled < 12:
        bench.step()
    bench.add("late", PROMPT, group="g", first_token=token_of("late", 0))
    while "late" not in bench.connector.loading:
        bench.step()
    bench.step()
    bench.scheduler.abort("a")
    while bench.in_flight:
        bench.land()
    bench.end_load("late", None)
    bench.run()
    bench.add("next turn", [*PROMPT, *(token_of("a", index) for index in range(3))])
    bench.run()


def test_group_with_two_prompts_is_rejected() -> None:
    bench = Bench()
    bench.add("a", PROMPT, group="g")
    with pytest.raises(AssertionError, match="answers two different prompts"):
        bench.add("b", PROMPT[1:], group="g")
