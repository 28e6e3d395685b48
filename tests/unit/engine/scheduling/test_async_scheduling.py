"""Async scheduling: steps are planned while earlier ones are in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scheduling import Bench, token_of

from mooncake_engine.config import EngineConfig
from mooncake_engine.messages import FinishReason
from mooncake_engine.scheduling.request import RequestStatus
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

PROMPT = list(range(10))


def ahead(num_blocks: int = 32, *, uses_async_scheduling: bool = True, **options: Any) -> Bench:
    return Bench(num_blocks, depth=2, uses_async_scheduling=uses_async_scheduling, **options)


def who(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(s.request_id, s.start, s.count) for s in plan.sequences]


@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("depth", [2, 3])
def test_async_scheduling_gives_the_same_tokens(num_blocks: int, depth: int) -> None:
    benches = [
        Bench(
            num_blocks,
            num_host_blocks=20,
            token=None,
            max_num_batched_tokens=12,
            depth=steps,
            uses_async_scheduling=steps > 1,
        )
        for steps in (1, depth)
    ]
    for bench in benches:
        for index in range(6):
            group = f"g{index}" if index % 2 else None
            for copy in range(3 if group else 1):
                prompt = range(100 * index, 100 * index + 3 + 4 * index)
                bench.add(f"r{index}-{copy}", prompt, arrival=index, max_tokens=20, group=group)
    answers = [bench.run() for bench in benches]
    assert answers[0] == answers[1]
    assert all(bench.num_free == num_blocks for bench in benches)


@pytest.mark.parametrize(
    ("options", "steps", "uses_async_scheduling"),
    [
        ({}, 1, False),
        ({"async_scheduling": True}, 2, True),
        ({"pp_size": 2}, 3, False),
        ({"pp_size": 2, "async_scheduling": True}, 3, False),
        (
            {
                "speculative_config": SpeculativeConfig(SpeculativeMethod.NGRAM),
                "async_scheduling": True,
            },
            2,
            True,
        ),
        (
            {
                "speculative_config": SpeculativeConfig(SpeculativeMethod.NGRAM),
                "async_scheduling": True,
                "dp_size": 2,
                "ep_size": 2,
            },
            2,
            True,
        ),
    ],
)
def test_steps_in_flight_follow_from_the_options(
    options: dict[str, Any], steps: int, uses_async_scheduling: bool
) -> None:
    config = EngineConfig(Path(), **options)
    assert (config.steps_in_flight, config.uses_async_scheduling) == (steps, uses_async_scheduling)


def test_step_after_drafts_is_planned_before_its_start_is_known() -> None:
    bench = ahead(num_speculative_tokens=3)
    request = bench.add("a", PROMPT, max_tokens=12)
    bench.worker.num_accepted = 3
    plans = [bench.step()[0].sequences[0] for _ in range(2)]
    assert all(plan.num_draft_tokens == 0 for plan in plans), "the first token is still unknown"
    steps = [bench.step() for _ in range(4)]
    shares = [plan.sequences[0] for plan, _ in steps if plan.sequences]
    assert [(s.start, s.num_unverified_drafts, s.num_draft_tokens) for s in shares] == [
        (11, 0, 3),
        (12, 3, 3),  # it runs at 15
        (16, 3, 1),  # it runs at 19, and samples the last of 22 tokens
    ]
    assert [[u.token_ids for u in updates] for _, updates in steps] == [
        [(7,)],
        [(7, 7, 7, 7)],
        [(7, 7, 7, 7)],
        [(7, 7)],
    ]
    assert (len(request.token_ids), bench.num_free) == (22, 32)


@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_draft_blocks_are_kept_while_a_step_in_flight_may_write_to_them(
    num_accepted: int,
) -> None:
    bench = ahead(num_speculative_tokens=9)
    request = bench.add("a", PROMPT, max_tokens=40)
    bench.worker.num_accepted = num_accepted
    for _ in range(4):
        bench.step()
    [following] = bench.in_flight
    [share] = following.sequences
    end = request.num_computed + share.count + share.num_draft_tokens
    assert len(request.block_ids) == -(-end // 4)
    bench.run()
    assert bench.num_free == 32


def test_sibling_forks_from_a_sequence_with_drafts_in_flight() -> None:
    """The sibling copies the block that it is going to write to at once; the other sequence, which
    has further blocks, keeps the original."""
    bench = ahead(num_speculative_tokens=6, max_num_seqs=1, prefix_caching=False, token=None)
    for name in ("a", "b"):
        bench.add(name, PROMPT, max_tokens=20, group="g")
    bench.worker.num_accepted = 1
    for _ in range(4):
        bench.step()
    bench.scheduler._budget.max_num_seqs = 2
    answers = bench.run()
    assert len(answers["b"]) == 20
    assert bench.num_free == 32


def test_async_scheduling_runs_without_drafts_above_the_sequence_limit() -> None:
    bench = ahead(num_speculative_tokens=3, max_seqs_with_drafts=1)
    for name in ("a", "b"):
        bench.add(name, PROMPT, max_tokens=20)
    plans = [bench.step()[0] for _ in range(8)]
    assert all(len(plan.sequences) == 2 and not plan.has_drafts for plan in plans)
    bench.scheduler.abort("a")
    plans = [bench.step()[0] for _ in range(4)]
    assert any(plan.has_drafts for plan in plans)


def test_drafts_do_not_delay_a_prompt() -> None:
    bench = ahead(num_speculative_tokens=3, max_num_batched_tokens=8)
    bench.add("a", [1, 2], max_tokens=30)
    for _ in range(4):
        bench.step()
    bench.add("b", range(100, 120))
    plans = [bench.step()[0] for _ in range(5)]
    assert [share for plan in plans for share in who(plan) if share[0] == "b"] == [
        ("b", 0, 7),
        ("b", 7, 7),
        ("b", 14, 6),
        ("b", 20, 1),
        ("b", 21, 1),
    ]
    begun = next(index for index, plan in enumerate(plans) if len(who(plan)) == 2)
    assert all(len(who(plan)) == 2 for plan in plans[begun : begun + 3]), (
        "a sequence is missing from a step"
    )


def test_placeholder_token_runs_before_it_is_sampled() -> None:
    bench = ahead()
    bench.add("a", PROMPT)
    assert who(bench.step()[0]) == [("a", 0, 10)]
    plan, updates = bench.step()
    assert who(plan) == [("a", 10, 1)]
    assert [update.token_ids for update in updates] == [(7,)]


def test_prompt_chunks_run_ahead_without_async_scheduling() -> None:
    bench = ahead(uses_async_scheduling=False, max_num_batched_tokens=4)
    bench.add("a", PROMPT)
    plans = [bench.scheduler.schedule() for _ in range(4)]
    assert [who(plan) for plan in plans] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], []]
    for plan in plans:
        bench.scheduler.update(plan, bench.worker.execute(plan))
    assert who(bench.scheduler.schedule()) == [("a", 10, 1)]


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 100), (50, 13)])
def test_nothing_runs_beyond_a_length_limit(max_tokens: int, max_model_len: int) -> None:
    bench = ahead(max_model_len=max_model_len)
    bench.add("a", PROMPT, max_tokens=max_tokens)
    assert bench.run() == {"a": [7, 7, 7]}
    assert bench.worker.num_computed == len(PROMPT) + 2


def test_tokens_after_eos_are_dropped() -> None:
    bench = ahead(token=2)
    bench.add("a", PROMPT)
    bench.step()
    _, [update] = bench.step()
    assert (update.token_ids, update.finish) == ((2,), FinishReason.STOP)
    assert bench.num_free < 32, "a step in flight writes to its blocks"
    _, updates = bench.step()
    assert updates == []
    assert bench.num_free == 32


def test_blocks_are_kept_while_a_step_in_flight_writes_to_them() -> None:
    bench = ahead()
    bench.add("a", PROMPT)
    bench.step()
    bench.scheduler.abort("a")
    assert [u.finish for u in bench.scheduler.take_updates()] == [FinishReason.ABORT]
    assert bench.num_free < 32
    assert not bench.scheduler.reset_prefix_cache()
    bench.land()
    assert bench.num_free == 32


def test_sender_is_withdrawn_once_no_step_is_in_flight() -> None:
    bench = ahead(max_num_batched_tokens=4)
    bench.add("a", PROMPT, sends_kv=True)
    bench.step()
    bench.scheduler.abort("a")
    assert bench.connector.withdrawn == []
    bench.land()
    assert bench.connector.withdrawn == ["a"]
    assert bench.num_free < 32, "the peer may still read the blocks"
    bench.scheduler.release("a")
    assert bench.num_free == 32


def test_kv_is_offered_only_once_computed() -> None:
    bench = ahead(max_num_batched_tokens=8)
    bench.add("a", PROMPT, keeps_kv=True)
    bench.step()
    assert bench.step()[1] == []
    assert bench.connector.offered == {}
    bench.step()
    bench.worker.check(bench.connector.offered["a"], PROMPT)


def test_request_id_can_be_reused_after_an_abort() -> None:
    bench = ahead()
    bench.add("a", PROMPT)
    bench.step()
    bench.scheduler.abort("a")
    again = bench.add("a", [*PROMPT, 11], max_tokens=2)
    bench.step()
    assert again.token_ids == [*PROMPT, 11], "the aborted request's token is dropped"
    assert bench.run() == {"a": [7, 7]}


def test_prefix_is_cached_only_once_computed() -> None:
    bench = ahead()
    bench.add("a", PROMPT)
    bench.step()
    other = bench.add("b", PROMPT)
    bench.step()
    assert other.num_cached_tokens == 0
    third = bench.add("c", PROMPT)
    bench.step()
    assert third.num_cached_tokens == 8


def test_siblings_continue_without_their_leader() -> None:
    bench = ahead(token=None)
    for name in ("a0", "a1"):
        bench.add(name, PROMPT, group="a", max_tokens=3)
    plan, _ = bench.step()
    assert plan.sequences[0].siblings == ("a1",)
    bench.scheduler.abort("a0")
    assert bench.run() == {"a0": [], "a1": [token_of("a1", index) for index in range(3)]}
    assert bench.num_free == 32


def test_no_request_is_preempted_while_steps_are_in_flight() -> None:
    bench = ahead(6, max_model_len=20)
    first = bench.add("a", PROMPT, arrival=0, max_tokens=10)
    second = bench.add("b", PROMPT[1:], arrival=1, max_tokens=10)
    plan, _ = bench.step()
    while plan.sequences:
        plan, _ = bench.step()
    assert bench.num_free == 0
    assert second.status is RequestStatus.RUNNING
    plan, _ = bench.step()
    assert [name for name, _, _ in who(plan)] == ["a"]
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    bench.run()
    assert second.token_ids == [*PROMPT[1:], *[7] * 10]


def test_a_load_waits_until_swapped_blocks_are_copied() -> None:
    bench = ahead(8, num_host_blocks=8, max_model_len=24)
    bench.add("a", PROMPT, max_tokens=14)
    for name in ("b0", "b1"):
        bench.add(name, PROMPT[1:], arrival=1, max_tokens=14, group="b")
    while not any(plan.swap_outs for plan in bench.in_flight):
        bench.step()
    bench.add("loaded", [50], arrival=2, first_token=51)
    bench.scheduler.abort("b0")
    bench.scheduler.abort("b1")
    bench.scheduler.schedule()
    assert bench.connector.loading == {}


@pytest.mark.parametrize("uses_async_scheduling", [False, True])
def test_swap_in_is_copied_in_a_step_without_sequences(
    uses_async_scheduling: bool,
) -> None:
    """The last sequence of a group takes the last free blocks, and lacks one to continue."""
    bench = ahead(
        5, num_host_blocks=8, uses_async_scheduling=uses_async_scheduling, max_model_len=20
    )
    bench.add("old", [1, 2, 3, 4], arrival=0, max_tokens=6)
    for name in ("new0", "new1"):
        bench.add(name, [5, 6, 7, 8], arrival=1, max_tokens=14, group="new")
    while not bench.scheduler.num_swapped:
        bench.step()
    bench.scheduler.abort("new0")
    plans = []
    while bench.scheduler.has_work:
        plans.append(bench.step()[0])  # attending to another request's KV raises
    assert any(plan.swap_ins and not plan.sequences for plan in plans)
    assert bench.num_free == 5


def test_sequence_that_lacks_a_block_is_not_starved() -> None:
    bench = ahead(8, max_model_len=28, prefix_caching=False)
    bench.add("a", PROMPT[:9], arrival=0, max_tokens=19)
    needy = bench.add("b", PROMPT[:8], arrival=1, max_tokens=10)
    bench.add("c", PROMPT[:9], arrival=2, max_tokens=10)
    for _ in range(4):
        bench.step()
    assert bench.scheduler.num_preemptions == 1, "the newest is preempted for the second"
    assert needy.num_pending == 1
