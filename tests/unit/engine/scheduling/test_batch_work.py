"""Batch work uses capacity that interactive requests leave, and is preempted for them at once."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from support.scheduling import Bench, token_of

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_engine.scheduling.request import RequestStatus

NO_EOS: frozenset[int] = frozenset()


def states(bench: Bench) -> dict[str, RequestStatus]:
    return {name: r.status for name, r in bench.scheduler._queues.requests.items()}


def test_batch_work_is_preempted_for_an_interactive_request() -> None:
    """In the same class, the newer request would wait for the older one to finish."""
    bench = Bench(8, token=None, eos_token_ids=NO_EOS)
    bench.add("batch", range(20), max_tokens=8, priority=BATCH_PRIORITY)
    bench.step()
    bench.add("chat", range(50, 70), arrival=1.0, max_tokens=4)
    bench.step()
    assert states(bench)["batch"] is RequestStatus.WAITING
    bench.step()
    assert states(bench)["chat"] is RequestStatus.RUNNING
    answers = bench.run()
    # the first token was generated before the preemption
    assert answers["batch"] == [token_of("batch", index) for index in range(1, 8)]
    assert bench.scheduler.num_preemptions == 1


def test_batch_work_is_preempted_for_a_sequence_slot() -> None:
    bench = Bench(32, max_num_seqs=1, token=None, eos_token_ids=NO_EOS)
    bench.add("batch", range(8), priority=BATCH_PRIORITY)
    bench.step()
    bench.add("chat", range(50, 58), arrival=1.0)
    bench.step()
    bench.step()
    assert states(bench) == {"batch": RequestStatus.WAITING, "chat": RequestStatus.RUNNING}


def test_nothing_is_preempted_if_both_fit() -> None:
    bench = Bench(32, token=None, eos_token_ids=NO_EOS)
    bench.add("batch", range(8), priority=BATCH_PRIORITY)
    bench.step()
    bench.add("chat", range(50, 58), arrival=1.0)
    plan, _ = bench.step()
    assert {sequence.request_id for sequence in plan.sequences} == {"batch", "chat"}
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_nothing_is_preempted_for_a_prompt_whose_blocks_another_request_has() -> None:
    """The cached prefix of a request that runs takes no free block."""
    bench = Bench(24, token=None, eos_token_ids=NO_EOS)
    bench.add("first", range(41), max_tokens=4)
    bench.step()
    bench.add("batch", range(100, 120), max_tokens=4, priority=BATCH_PRIORITY, arrival=1.0)
    bench.step()
    assert bench.num_free < 11
    bench.add("second", [*range(40), 99], max_tokens=2, arrival=2.0)
    plan, _ = bench.step()
    assert {s.request_id for s in plan.sequences} == {"first", "batch", "second"}
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_batch_work_is_preempted_for_a_prompt_whose_cached_blocks_are_free() -> None:
    """To run on a cached block that no request has takes a free block like any other."""
    bench = Bench(15, token=None, eos_token_ids=NO_EOS)
    bench.add("first", range(41), max_tokens=1)
    bench.step()
    bench.add("batch", range(100, 117), max_tokens=8, priority=BATCH_PRIORITY, arrival=1.0)
    bench.step()
    assert bench.num_free == 10
    second = bench.add("second", [*range(40), 99], max_tokens=2, arrival=2.0)
    assert bench.scheduler.blocks.count_cached(second, 40) == 40
    bench.step()
    bench.step()
    assert states(bench) == {"batch": RequestStatus.WAITING, "second": RequestStatus.RUNNING}


def test_long_batch_prompt_pauses_for_an_interactive_prompt() -> None:
    bench = Bench(32, max_num_batched_tokens=16, token=None, eos_token_ids=NO_EOS)
    bench.add("batch", range(80), max_tokens=1, priority=BATCH_PRIORITY)
    bench.step()
    bench.add("chat", range(100, 116), arrival=1.0, max_tokens=1)
    plan, _ = bench.step()
    assert [(s.request_id, s.count) for s in plan.sequences] == [("chat", 16)]
    plan, _ = bench.step()
    assert [s.request_id for s in plan.sequences] == ["batch"], (
        "the batch prompt continues where it paused"
    )
    assert plan.sequences[0].start == 16


def test_no_batch_work_starts_while_an_interactive_request_waits() -> None:
    bench = Bench(8, max_num_seqs=2, token=None, eos_token_ids=NO_EOS)
    for name in ("one", "two"):
        bench.add(name, range(12), max_tokens=8)
    bench.add("batch", range(50, 54), priority=BATCH_PRIORITY)
    bench.add("three", range(70, 74), arrival=1.0)
    seen = []
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        seen += [new.request_id for new in plan.new_requests if new.request_id not in seen]
    assert seen == ["one", "two", "three", "batch"]


def test_queued_batch_work_does_not_delay_interactive_loads() -> None:
    bench = Bench(10, max_num_seqs=8, token=None, eos_token_ids=NO_EOS)
    bench.add("first", range(24), max_tokens=8)
    bench.step()
    bench.add("batch", range(50, 74), priority=BATCH_PRIORITY)
    bench.add("loaded", [90], arrival=1.0, first_token=5, max_tokens=4)
    bench.step()
    assert states(bench)["batch"] is RequestStatus.WAITING
    assert states(bench)["loaded"] is not RequestStatus.PREALLOCATING


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 6), st.sampled_from((None, "g"))),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from((1, 2, 3)), st.sampled_from((0, 8)))
def test_all_requests_finish_with_the_tokens_of_a_single_run(
    load: list[tuple[int, bool, int, str | None]], depth: int, num_host_blocks: int
) -> None:
    """In any mix of both classes, every request finishes with the tokens that it gets alone."""
    bench = Bench(
        *(10,),
        num_host_blocks=num_host_blocks,
        max_num_seqs=3,
        token=None,
        depth=depth,
        eos_token_ids=NO_EOS,
    )
    for number, (length, is_batch, wait, group) in enumerate(load):
        for _ in range(wait):
            bench.step()
        priority = BATCH_PRIORITY if is_batch else 0
        size = 2 if group and length < 10 else 1
        for index in range(size):
            bench.add(
                f"r{number}-{index}",
                range(length),
                arrival=float(number),
                max_tokens=6,
                priority=priority,
                group=f"g{number}" if size > 1 else None,
            )
    answers = bench.run()
    for name, tokens in answers.items():
        assert tokens[-1] == token_of(name, 5)
    assert bench.num_free == 10
