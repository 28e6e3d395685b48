"""Preemption when blocks run out: by swapping or recomputation, and how requests resume."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from support.scheduling import Bench, make_request, token_of

from mooncake_engine.scheduling.request import RequestStatus
from mooncake_engine.scheduling.step_budget import AdmissionDelay


def crowd(bench: Bench, count: int, *, max_tokens: int = 8, length: int = 7) -> None:
    """An old single request, and a newer one with ``count`` answers."""
    bench.add("old", range(10, 10 + length), arrival=0.0, max_tokens=max_tokens)
    for index in range(count):
        bench.add(
            f"new{index}", range(30, 30 + length), arrival=1.0, max_tokens=max_tokens, group="g"
        )


def expected(name: str, max_tokens: int = 8) -> list[int]:
    return [token_of(name, index) for index in range(max_tokens)]


def states(bench: Bench) -> dict[str, RequestStatus]:
    return {name: r.status for name, r in bench.scheduler._queues.requests.items()}


def test_group_is_swapped_out_and_in_without_recomputation() -> None:
    bench = Bench(8, num_host_blocks=8, token=None, eos_token_ids=frozenset())
    crowd(bench, 2)
    answers = bench.run()
    assert answers == {name: expected(name) for name in ("old", "new0", "new1")}
    assert bench.scheduler.num_swap_outs >= 2
    assert bench.scheduler.num_preemptions == bench.scheduler.num_swap_outs
    assert bench.worker.num_computed == 7 + 7 + 3 * 7


def test_preemption_is_reported_and_counts_no_prompt_twice() -> None:
    bench = Bench(8, token=None, eos_token_ids=frozenset())
    crowd(bench, 2)
    ends = {}
    for _ in range(100):
        ends |= {update.request_id: update for update in bench.step()[1] if update.finish}
    counts = [update.times.num_preemptions for update in ends.values() if update.times]
    assert sum(counts) == bench.scheduler.num_preemptions > 0
    assert sum(bench.scheduler.prompt_tokens_by_source.values()) == 3 * 7
    assert bench.scheduler.blocks.num_queried_tokens == 2 * 7, "one choice follows the other"


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_prompt_computed_before_its_preemption_is_not_reported_as_cached(count: int) -> None:
    """With two choices, the second one starts over first, and finds what the first has computed."""
    bench = Bench(11 + count, max_num_batched_tokens=5, eos_token_ids=frozenset())
    bench.add("old", range(10, 16), max_tokens=30)
    bench.step()
    for index in range(count):
        bench.add(f"new{index}", range(30, 68), arrival=1.0, max_tokens=2, group="g")
    cached: dict[str, set[int]] = {"new0": set()}
    num_preemptions = 0
    while bench.scheduler.has_work:
        for update in bench.step()[1]:
            cached.setdefault(update.request_id, set()).add(update.num_cached_tokens)
            if update.request_id == "new0" and update.times is not None:
                num_preemptions = update.times.num_preemptions
    assert num_preemptions > 0
    assert cached["new0"] == {0}


@pytest.mark.parametrize("depth", [1, 2])
def test_swapping_a_group_overlaps_with_steps(depth: int) -> None:
    """The group resumes once its copies have completed; the others continue meanwhile."""
    bench = Bench(
        8,
        num_host_blocks=8,
        token=None,
        eos_token_ids=frozenset(),
        depth=depth,
        uses_async_scheduling=depth > 1,
    )
    bench.worker.copies_late = True
    crowd(bench, 2, max_tokens=20)
    answers: dict[str, list[int]] = {}
    num_beside = 0
    for _ in range(200):
        plan, updates = bench.step()
        num_beside += bool(plan.sequences) and bool(bench.worker._late)
        for update in updates:
            answers.setdefault(update.request_id, []).extend(update.token_ids)
        if not bench.scheduler.has_work:
            break
    assert answers == {name: expected(name, 20) for name in ("old", "new0", "new1")}
    assert bench.scheduler.num_swap_outs >= 2
    assert num_beside > 1, "copies delay steps"


def test_no_load_starts_in_blocks_that_are_being_copied() -> None:
    bench = Bench(8, num_host_blocks=8, token=None, eos_token_ids=frozenset())
    bench.worker.copies_late = True
    crowd(bench, 2)
    while not bench.scheduler.num_swapped:
        bench.step()
    for index in range(2):
        bench.scheduler.abort(f"new{index}")
    bench.scheduler.abort("old")
    bench.add("loaded", range(60, 80), first_token=50)
    late = []
    while not bench.connector.loading:
        late.append(len(bench.worker._late))
        bench.step()
    assert late[0] > 0
    assert not bench.worker._late, "a peer may overwrite blocks that are being copied"


def test_group_is_preempted_as_a_whole() -> None:
    bench = Bench(8, num_host_blocks=8, token=None, eos_token_ids=frozenset())
    crowd(bench, 2)
    seen = set()
    while bench.scheduler.has_work:
        bench.step()
        now = states(bench)
        if {"new0", "new1"} <= set(now):
            seen.add((now["new0"], now["new1"]))
    swapped, running = RequestStatus.SWAPPED, RequestStatus.RUNNING
    assert (swapped, swapped) in seen
    assert (running, running) in seen
    assert all(pair.count(swapped) != 1 for pair in seen), "half of a group is swapped"


def test_group_without_host_memory_is_recomputed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(6, token=None, eos_token_ids=frozenset())
    crowd(bench, 2)
    with caplog.at_level(logging.WARNING):
        assert bench.run() == {name: expected(name) for name in ("old", "new0", "new1")}
    assert bench.scheduler.num_swap_outs == 0
    assert bench.scheduler.num_preemptions >= 2
    assert [r.getMessage() for r in caplog.records] == [
        "not enough host memory to swap out the 2 sequences of a request: they are recomputed; "
        "raise --swap-space to avoid that"
    ]


def test_single_sequence_is_recomputed_despite_host_memory() -> None:
    bench = Bench(4, num_host_blocks=8, token=None, eos_token_ids=frozenset())
    crowd(bench, 0)
    bench.add("new", range(30, 37), arrival=1.0)
    assert bench.run() == {name: expected(name) for name in ("old", "new")}
    assert bench.scheduler.num_preemptions >= 1
    assert bench.scheduler.num_swap_outs == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_group_with_a_running_prompt_is_swapped(prefix_caching: bool) -> None:
    """One sequence of the group holds blocks; three sequences may run at once."""
    bench = Bench(
        12,
        num_host_blocks=8,
        token=None,
        eos_token_ids=frozenset(),
        max_num_batched_tokens=4,
        prefix_caching=prefix_caching,
    )
    crowd(bench, 0)
    for _ in range(3):
        bench.step()
    for index in range(3):
        bench.add(f"new{index}", range(30, 50), arrival=1.0, max_tokens=4, group="g")
    bench.step()
    pool = bench.scheduler.blocks.pool
    held = pool.allocate(pool.num_free)
    assert held is not None
    while not bench.scheduler.num_preemptions:
        bench.submit()
        bench.land()
    pool.release(held)
    assert bench.scheduler.num_swap_outs == 1
    assert bench.run()
    assert bench.worker.num_computed == 7 + 7 + 20 + 3 * 3, "nothing is computed twice"


def test_group_too_large_for_memory_finishes_one_by_one() -> None:
    bench = Bench(5, num_host_blocks=20, token=None, eos_token_ids=frozenset())
    for index in range(4):
        bench.add(f"a{index}", range(10, 17), group="g", max_tokens=13)
    assert bench.run() == {f"a{i}": expected(f"a{i}", 13) for i in range(4)}


def test_swapped_requests_resume_before_new_ones_start() -> None:
    bench = Bench(8, num_host_blocks=8, token=None, eos_token_ids=frozenset())
    crowd(bench, 2)
    while not bench.scheduler.num_swapped:
        bench.step()
    bench.add("newest", [50], arrival=2.0, max_tokens=1)
    while bench.scheduler.num_swapped:
        plan, _ = bench.step()
        ran = [sequence.request_id for sequence in plan.sequences]
        assert "newest" not in ran or not bench.scheduler.num_swapped
    assert "newest" in bench.run() or "newest" in ran


def test_request_of_higher_priority_precedes_a_swapped_one() -> None:
    bench = Bench(7, num_host_blocks=8, token=None, eos_token_ids=frozenset())
    crowd(bench, 2)
    while not bench.scheduler.num_swapped:
        bench.step()
    bench.add("urgent", [50], arrival=2.0, max_tokens=1, priority=-1)
    plan, _ = bench.step()
    assert "urgent" in [sequence.request_id for sequence in plan.sequences]


def test_swapped_request_can_be_aborted() -> None:
    bench = Bench(6, num_host_blocks=8, token=None)
    crowd(bench, 2)
    while not bench.scheduler.num_swapped:
        bench.step()
    bench.scheduler.abort("new0")
    bench.scheduler.check_integrity()
    bench.scheduler.abort("new1")
    bench.scheduler.check_integrity()
    assert bench.scheduler.blocks.host_pool.num_free == 8


def test_swapped_request_whose_kv_is_pushed_can_be_aborted() -> None:
    bench = Bench(12, num_host_blocks=8, token=None, max_num_batched_tokens=4)
    crowd(bench, 0)
    bench.step()
    for index in range(2):
        bench.add(f"new{index}", range(30, 50), arrival=1.0, group="g", sends_kv=True)
    while bench.num_free > 12 - 2 - 5:
        bench.step()
    pool = bench.scheduler.blocks.pool
    held = pool.allocate(pool.num_free)
    assert held is not None
    while not bench.scheduler.num_swapped:
        bench.submit()
        bench.land()
    pool.release(held)
    for name in ("new0", "new1"):
        bench.scheduler.abort(name)
        bench.scheduler.check_integrity()
    assert bench.scheduler.blocks.host_pool.num_free == 8


@pytest.mark.parametrize(("watermark", "new_request"), [(0.0, True), (0.2, False)])
def test_watermark_reserves_blocks_for_running_requests(
    watermark: float, new_request: bool
) -> None:
    bench = Bench(10, watermark=watermark)
    bench.add("old", range(10, 30))
    bench.step()
    bench.add("new", range(40, 56), arrival=1.0)
    bench.step()
    assert bench.scheduler.num_running == 1 + new_request


def test_watermark_does_not_block_a_single_request() -> None:
    bench = Bench(10, watermark=0.9, token=None)
    bench.add("large", range(100, 136), max_tokens=2)
    assert len(bench.run()["large"]) == 2


def test_delay_factor_postpones_prompts() -> None:
    bench = Bench(delay_factor=2.0)
    clock = 10.0

    def step_at(now: float) -> set[str]:
        bench.scheduler.expire(now)
        return {sequence.request_id for sequence in bench.step()[0].sequences}

    bench.add("first", [10, 11], arrival=clock)
    assert step_at(clock) == {"first"}  # nothing runs: no delay
    bench.add("second", [20, 21], arrival=clock + 1.0)
    assert step_at(clock + 1.0) == {"first"}  # the first prompt's step took 1 s: wait for 2 s
    assert step_at(clock + 3.0) == {"first"}
    assert step_at(clock + 3.1) == {"first", "second"}


def test_delay_factor_of_zero_does_not_postpone() -> None:
    delay = AdmissionDelay(0.0)
    delay.begin_step(5.0)
    delay.note_prefill()
    delay.begin_step(9.0)
    assert delay.has_passed([make_request("late", [1], arrival=9.0)])


def test_postponed_prompts_start_together() -> None:
    bench = Bench(delay_factor=2.0, max_num_seqs=8)

    def step_at(now: float) -> set[str]:
        bench.scheduler.expire(now)
        return {sequence.request_id for sequence in bench.step()[0].sequences}

    bench.add("first", [10, 11], arrival=10.0, max_tokens=20)
    step_at(10.0)
    for index in range(3):
        bench.add(f"r{index}", [20 + index, 21], arrival=11.0 + index / 2)
    assert step_at(11.0) == {"first"}
    assert step_at(13.1) == {"first", "r0", "r1", "r2"}, "the prompts start in separate steps"


def test_group_resumes_in_parts_if_the_device_can_not_hold_all_of_it() -> None:
    """A choice that loaded the prompt by itself was swapped out apart from the others."""
    options = {"token": None, "eos_token_ids": frozenset(), "prefix_caching": False}
    bench = Bench(13, num_host_blocks=20, **options)
    bench.add("old", range(40, 43), max_tokens=40)
    add = partial(bench.add, prompt=range(10, 25), arrival=1.0, max_tokens=22, group="g")
    first, second = (add(f"n{index}", pulls_kv=True) for index in range(2))
    bench.step()
    bench.end_load("n0", None)
    bench.end_load("n1", None)
    bench.step()
    bench.step()
    late = add("n2", pulls_kv=True)
    for _ in range(14):
        bench.step()
    assert (first.status, late.status) == (RequestStatus.SWAPPED, RequestStatus.TRANSFERRING)
    bench.end_load("n2", None)
    for _ in range(4):
        bench.step()
    held = bench.scheduler.blocks.pool.allocate(bench.num_free)
    assert held is not None
    for _ in range(8):
        bench.submit()
        bench.land()
    assert late.status is RequestStatus.SWAPPED
    bench.scheduler.blocks.pool.release(held)
    assert len({*first.host_block_ids, *second.host_block_ids, *late.host_block_ids}) > 13
    answers = bench.run()
    assert answers["n2"][-1] == token_of("n2", 21)
    assert bench.num_free == 13
