"""How a step's token budget is shared: decodes first, prompts take what is left."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from support.scheduling import Bench

from mooncake_engine.scheduling.request import RequestStatus


def counts_of(bench: Bench) -> dict[str, int]:
    plan, _ = bench.step()
    return {sequence.request_id: sequence.count for sequence in plan.sequences}


def test_decodes_go_before_a_prompt_of_higher_priority() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=8)
    bench.add("late", range(4), arrival=1.0)
    bench.step()
    bench.add("urgent", range(100, 140), priority=-1)
    assert counts_of(bench) == {"late": 1, "urgent": 7}
    for _ in range(4):
        assert counts_of(bench) == {"late": 1, "urgent": 7}, "a decode waits for a prompt"


def test_prompts_share_what_decodes_leave_in_order_of_priority() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8, prefix_caching=False)
    bench.add("decode", range(4))
    bench.step()
    bench.add("second", range(12), priority=1)
    bench.add("first", range(12), priority=0)
    assert counts_of(bench) == {"decode": 1, "first": 7}
    assert counts_of(bench) == {"decode": 1, "first": 5, "second": 2}


def test_decodes_of_a_group_go_before_the_prompt_of_an_older_request() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8)
    for index in range(2):
        bench.add(f"late-{index}", range(5), arrival=1.0, group="late")
    bench.step()
    bench.add("urgent", range(100, 140), priority=-1)
    for _ in range(3):
        assert counts_of(bench) == {"late-0": 1, "late-1": 1, "urgent": 6}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),  # prompt tokens
            st.integers(-2, 2),  # priority
            st.integers(0, 4),  # steps before it comes
        ),
        min_size=2,
        max_size=8,
    )
)
def test_no_decode_waits_for_a_prompt_and_no_prompt_starves(
    load: list[tuple[int, int, int]],
) -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=12, token=None)
    scheduler = bench.scheduler
    for number, (length, priority, wait) in enumerate(load):
        for _ in range(wait):
            bench.step()
        bench.add(f"r{number}", range(100 * number, 100 * number + length), priority=priority)
    for _ in range(60):
        decodes = {
            request.request_id
            for request in scheduler._queues.running
            if request.state is RequestStatus.RUNNING and request.num_pending == 1
        }
        plan, _ = bench.step()
        scheduled = {sequence.request_id for sequence in plan.sequences}
        assert decodes <= scheduled
    assert not scheduler.has_work
