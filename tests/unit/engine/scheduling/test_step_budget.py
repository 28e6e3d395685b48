"""How a step's token budget is divided: decodes first, prompts get the remainder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from support.scheduling import Bench

from mooncake_engine.scheduling.request import RequestStatus
from mooncake_engine.scheduling.step_budget import StepTimes
from mooncake_engine.scheduling.step_plan import SampledToken, StepResult


def counts_of(bench: Bench) -> dict[str, int]:
    plan, _ = bench.step()
    return {sequence.request_id: sequence.count for sequence in plan.sequences}


def test_decodes_precede_a_prompt_of_higher_priority() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=8)
    bench.add("late", range(4), arrival=1.0)
    bench.step()
    bench.add("urgent", range(100, 140), priority=-1)
    assert counts_of(bench) == {"late": 1, "urgent": 7}
    for _ in range(4):
        assert counts_of(bench) == {"late": 1, "urgent": 7}, "a decode waits for a prompt"


def test_prompts_get_the_remaining_budget_by_priority() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8, prefix_caching=False)
    bench.add("decode", range(4))
    bench.step()
    bench.add("second", range(12), priority=1)
    bench.add("first", range(12), priority=0)
    assert counts_of(bench) == {"decode": 1, "first": 7}
    assert counts_of(bench) == {"decode": 1, "first": 5, "second": 2}


def test_decodes_of_a_group_precede_the_prompt_of_an_older_request() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8)
    for index in range(2):
        bench.add(f"late-{index}", range(5), arrival=1.0, group="late")
    bench.step()
    bench.add("urgent", range(100, 140), priority=-1)
    for _ in range(3):
        assert counts_of(bench) == {"late-0": 1, "late-1": 1, "urgent": 6}


def test_max_step_tokens_with_decodes_bounds_only_steps_with_decodes() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=32, max_step_tokens_with_decodes=8)
    bench.add("first", range(30))
    assert counts_of(bench) == {"first": 30}
    bench.add("second", range(100, 130))
    assert counts_of(bench) == {"first": 1, "second": 7}


def test_bound_below_the_decodes_leaves_the_minimum_chunk() -> None:
    bench = Bench(
        num_blocks=64,
        max_num_batched_tokens=32,
        max_step_tokens_with_decodes=2,
        min_prefill_chunk=4,
    )
    for index in range(3):
        bench.add(f"decode-{index}", [10 * index, 1])
    bench.step()
    bench.add("prompt", range(100, 130))
    assert counts_of(bench)["prompt"] == 4


def test_prompt_gets_no_chunk_below_the_minimum() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=12, min_prefill_chunk=4)
    bench.add("decode", [1, 2])
    bench.step()
    bench.add("first", range(100, 109))
    bench.add("second", range(200, 220), arrival=1.0)
    assert counts_of(bench) == {"decode": 1, "first": 9}, (
        "a chunk of two tokens is below the minimum"
    )
    assert counts_of(bench) == {"decode": 1, "first": 1, "second": 10}


def test_last_chunk_of_a_prompt_may_be_below_the_minimum() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=12, min_prefill_chunk=4)
    bench.add("prompt", range(100, 114))
    assert counts_of(bench) == {"prompt": 12}
    assert counts_of(bench) == {"prompt": 2}


def test_prefill_chunk_size_bounds_chunks() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=32, prefill_chunk_size=6)
    bench.add("first", range(100, 110))
    bench.add("second", range(200, 210), arrival=1.0)
    assert counts_of(bench) == {"first": 6, "second": 6}
    assert counts_of(bench) == {"first": 4, "second": 4}


def test_prompt_is_divided_into_one_chunk_per_stage() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=64, num_stages=3, depth=4)
    bench.add("prompt", range(100, 122))
    chunks = [
        [sequence.count for sequence in plan.sequences]
        for plan in (bench.submit() for _ in range(3))
    ]
    assert chunks == [[8], [8], [6]], "stages wait while one computes the whole prompt"


def test_loaded_decode_does_not_wait_for_a_prompt() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8)
    bench.add("prompt", range(100, 140))
    bench.step()
    bench.add("loaded", range(10), first_token=50, arrival=1.0)
    bench.scheduler._remote_kv.start(0)
    bench.end_load("loaded", None)
    assert counts_of(bench) == {"prompt": 7, "loaded": 1}


def test_budget_bounds_the_number_of_sequences() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=3, max_num_seqs=8)
    for index in range(5):
        bench.add(f"r{index}", [10 * index], max_tokens=20)
    for _ in range(4):
        counts = counts_of(bench)
    assert counts == {"r0": 1, "r1": 1, "r2": 1}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),  # prompt tokens
            st.integers(-2, 2),  # priority
            st.integers(0, 4),  # steps before it arrives
            st.booleans(),  # whether a peer has its KV
        ),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from([None, 1, 6, 10]),
    st.integers(1, 20),
    st.sampled_from([None, 3, 9]),
)
def test_no_decode_waits_for_a_prompt_and_no_prompt_starves(
    load: list[tuple[int, int, int, bool]],
    bound: int | None,
    min_chunk: int,
    chunk_size: int | None,
) -> None:
    budget = 12
    bench = Bench(
        num_blocks=128,
        max_num_batched_tokens=budget,
        max_step_tokens_with_decodes=bound,
        min_prefill_chunk=min_chunk,
        prefill_chunk_size=chunk_size,
        token=None,
    )
    scheduler = bench.scheduler
    smallest = scheduler._budget.min_chunk

    def check_step() -> None:
        for name in list(bench.connector.loading):
            bench.end_load(name, None)
        running = [r for r in scheduler._queues.running if r.status is RequestStatus.RUNNING]
        ready = {r.request_id for r in scheduler._queues.ready}
        begun = ready if len(running) < 4 else set()
        decodes = {r.request_id for r in running if r.num_pending == 1}
        prompts = [r for r in running if r.num_pending > 1]
        expected = min(prompts[0].num_pending, smallest) if prompts else 0
        plan, _ = bench.step()
        counts = {sequence.request_id: sequence.count for sequence in plan.sequences}
        assert decodes | begun <= set(counts), "a decode waits"
        assert not prompts or counts.get(prompts[0].request_id, 0) >= expected, "a prompt starves"
        num_decodes = len((decodes | ready) & set(counts))
        if bound is not None and num_decodes:
            assert plan.num_tokens <= max(bound, num_decodes + smallest)

    for number, (length, priority, wait, is_loaded) in enumerate(load):
        for _ in range(wait):
            check_step()
        prompt = range(100 * number, 100 * number + length)
        first = 60 if is_loaded else None
        bench.add(f"r{number}", prompt, priority=priority, first_token=first, max_tokens=30)
    for _ in range(400):
        check_step()
        if not scheduler.has_work and not bench.connector.loading:
            return
    raise AssertionError("not done")


def test_prompt_tokens_fit_the_target_tbt() -> None:
    times = StepTimes(first_tokens=64)
    assert times.prompt_tokens_within(0.05) == 64
    for _ in range(40):
        times.learn(32, 0, 0.010)
        tokens = times.prompt_tokens_within(0.05)
        times.learn(32, tokens, 0.010 + tokens * 1e-4)
    assert times.prompt_tokens_within(0.05) == pytest.approx(400, rel=0.02)
    for _ in range(40):  # a longer context, a throttled device: all steps take twice as long
        times.learn(32, 0, 0.020)
        tokens = times.prompt_tokens_within(0.05)
        times.learn(32, tokens, 0.020 + tokens * 2e-4)
    assert times.prompt_tokens_within(0.05) == pytest.approx(150, rel=0.05)


def test_varying_step_times_reduce_prompt_tokens() -> None:
    even, swinging = StepTimes(first_tokens=64), StepTimes(first_tokens=64)
    for number in range(200):
        swing = 0.004 if number % 2 else -0.004
        for times, seconds in ((even, 0.020), (swinging, 0.020 + swing)):
            times.learn(32, 0, 0.010)
            times.learn(32, 50, seconds)
    assert even.prompt_tokens_within(0.020) == 50
    assert swinging.prompt_tokens_within(0.020) < 25, "two deviations of 4 ms leave 2 of the 10 ms"


def test_short_step_at_most_doubles_the_tokens() -> None:
    times = StepTimes(first_tokens=10)
    times.learn(4, 0, 0.010)
    times.learn(4, 10, 0.010)  # no longer than a step without prompt tokens: noise
    assert times.prompt_tokens_within(1.0) == 20


def test_scheduler_meets_the_target_tbt() -> None:
    bench = Bench(
        num_blocks=2000,
        max_num_batched_tokens=1000,
        min_prefill_chunk=4,
        target_tbt_s=0.05,
        max_model_len=8000,
        token=7,
    )
    scheduler, now = bench.scheduler, 100.0
    bench.add("decode", [1, 2], max_tokens=5000)
    bench.add("prompt", range(10, 7010), arrival=1.0)
    elapsed = []
    for _ in range(60):
        scheduler.expire(now)
        plan = scheduler.schedule()
        seconds = 0.010 + 1e-4 * (plan.num_tokens - 1)
        now += seconds
        scheduler.update(plan, bench.worker.execute(plan), now)
        elapsed.append(seconds)
    assert max(elapsed[1:]) <= 0.055
    assert max(elapsed[1:]) > 0.04, "the time available goes unused"


def test_last_chunks_of_a_long_prompt_meet_the_target_tbt() -> None:
    """A token costs more the longer its context: in the end even the minimum chunk takes longer
    than the target allows. Step costs are as measured: 32 decodes, one thread, a small Llama."""
    bench = Bench(
        num_blocks=1500,
        block_size=16,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        prefix_caching=False,
        target_tbt_s=0.035,
        min_prefill_chunk=16,
    )
    for index in range(32):
        bench.add(f"d{index}", range(8), max_tokens=500)
    now, elapsed = 0.0, []
    for step in range(220):
        if step == 20:
            bench.add("prompt", range(2000), max_tokens=1, arrival=1.0)
        bench.scheduler.expire(now)
        plan = bench.scheduler.schedule()
        chunks = [sequence for sequence in plan.sequences if sequence.count > 1]
        prompts_s = [0.002 + c.count * (0.00045 + 4e-7 * c.start) for c in chunks]
        now += 0.0235 + sum(prompts_s)
        tokens = {s.request_id: (SampledToken(7),) for s in plan.sequences if s.is_sampling}
        bench.scheduler.update(plan, StepResult(plan.step, tokens), now)
        if step >= 20:
            elapsed += [0.0235 + seconds for seconds in prompts_s]
    assert not chunks, "the prompt is complete"
    assert max(elapsed) <= 0.035 * 1.1
