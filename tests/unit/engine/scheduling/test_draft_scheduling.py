"""Drafts use a step's spare tokens, and rejected drafts leave no blocks or cached tokens behind."""

from __future__ import annotations

import pytest
from support.scheduling import EOS, Bench, token_of

from mooncake_engine.messages import FinishReason, SpeculationStats
from mooncake_engine.scheduling.draft_scheduling import DraftGate

NUM_DRAFT_TOKENS = 3


def test_accepted_drafts_are_returned_in_one_update() -> None:
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS)
    bench.add("a", range(10, 16), max_tokens=12)
    _, updates = bench.step()
    assert [update.token_ids for update in updates] == [(7,)]
    bench.worker.num_accepted = 2
    plan, updates = bench.step()
    assert plan.sequences[0].num_draft_tokens == NUM_DRAFT_TOKENS
    assert plan.num_tokens == 1 + NUM_DRAFT_TOKENS
    assert [update.token_ids for update in updates] == [(7, 7, 7)]
    assert bench.step()[0].sequences[0].start == 9
    stats = bench.scheduler.speculation.stats()
    assert stats == SpeculationStats(2, 5, (2, 2, 0)), "one fewer is drafted after a rejection"


def test_no_drafts_before_the_first_token_or_beyond_the_limit() -> None:
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS)
    bench.add("a", [10], max_tokens=5)
    assert [bench.step()[0].sequences[0].num_draft_tokens for _ in range(5)] == [0, 3, 2, 1, 0]
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS, max_model_len=9)
    bench.add("b", range(10, 16), max_tokens=50)
    assert [bench.step()[0].sequences[0].num_draft_tokens for _ in range(3)] == [0, 1, 0]
    assert bench.scheduler.num_running == 0


def test_blocks_of_rejected_drafts_are_freed_after_the_step() -> None:
    bench = Bench(num_speculative_tokens=9)
    request = bench.add("a", range(10, 17), max_tokens=30)
    bench.step()
    plan, _ = bench.step()
    assert len(plan.sequences[0].new_block_ids) == 3, (
        "17 tokens take 5 blocks of 4, of which it has two"
    )
    assert len(request.block_ids) == 2
    assert bench.num_free == 14
    plan, _ = bench.step()
    assert plan.sequences[0].new_blocks_at == 2, "the workers have longer tables"


def test_prompts_precede_drafts() -> None:
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS, max_num_batched_tokens=8)
    bench.add("a", range(10, 14), max_tokens=20)
    bench.step()
    bench.add("b", range(20, 31), arrival=1.0)
    shares = [
        [(s.request_id, s.count, s.num_draft_tokens) for s in bench.step()[0].sequences]
        for _ in range(3)
    ]
    assert shares == [
        [("a", 1, 0), ("b", 7, 0)],
        [("a", 1, 3), ("b", 4, 0)],
        [("a", 1, 2), ("b", 1, 3)],
    ], "no draft of a was accepted"


def test_sequence_without_accepted_drafts_pauses_drafting() -> None:
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS)
    bench.add("a", [10], max_tokens=30)
    drafted = [bench.step()[0].sequences[0].num_draft_tokens for _ in range(12)]
    assert drafted == [0, 3, 2, 1, 0, 1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_accepted", [0, 3])
@pytest.mark.parametrize("num_steps", range(6))
def test_choice_from_a_peer_arrives_while_another_one_drafts(
    num_steps: int, num_accepted: int, depth: int
) -> None:
    """It shares the prompt's last block, which the other choice has not copied yet."""
    options = {"uses_async_scheduling": True, "num_speculative_tokens": 15}
    for length in (33, 39, 47, 48):
        bench = Bench(num_blocks=30, block_size=16, depth=depth, token=None, **options)
        bench.worker.num_accepted = num_accepted
        prompt = list(range(3, 3 + length))
        bench.add("first", prompt, max_tokens=30, group="n", pulls_kv=True)
        bench.step()
        bench.end_load("first", None)
        for _ in range(num_steps):
            bench.step()
        bench.add("second", prompt, max_tokens=30, group="n", pulls_kv=True)
        bench.step()
        bench.end_load("second", None)
        bench.run()


def test_drafts_never_preempt_a_request() -> None:
    """Two requests fill the pool to the last block; drafts would need more."""
    for num_accepted in range(6):
        bench = Bench(8, num_speculative_tokens=5, token=None)
        bench.worker.num_accepted = num_accepted
        for name in ("x1", "x2"):
            bench.add(name, range(10, 18), max_tokens=8)
        answers = bench.run()
        assert bench.scheduler.num_preemptions == 0
        for name, tokens in answers.items():
            assert tokens == [token_of(name, i) for i in range(len(tokens))]
            assert len(tokens) == 8 or tokens[-1] == EOS


def test_drafts_after_eos_are_dropped() -> None:
    bench = Bench(num_speculative_tokens=5, token=EOS)
    bench.add("a", [10, 11], max_tokens=20)
    bench.worker.token = 7
    bench.step()
    bench.worker.token, bench.worker.num_accepted = EOS, 5
    _, updates = bench.step()
    assert updates[0].token_ids == (EOS,)
    assert updates[0].finish is FinishReason.STOP
    assert bench.num_free == 16


def test_blocks_of_a_request_that_ends_are_freed_after_the_last_step_that_drafts_for_it() -> None:
    """The workers know nothing of the end: they accept all drafts, and draft behind them."""
    bench = Bench(depth=2, uses_async_scheduling=True, num_speculative_tokens=5)
    bench.add("a", range(10, 17), max_tokens=30)
    bench.worker.num_accepted = 5
    bench.submit()
    bench.submit()
    while not all(plan.has_drafts for plan in bench.in_flight):
        bench.land()
        bench.submit()
    num_free = bench.num_free
    bench.worker.token = EOS
    [update] = bench.land()
    assert update.finish is FinishReason.STOP
    assert bench.num_free == num_free, "a peer may write to a free block at once"
    bench.land()
    assert bench.num_free == 16


def test_only_accepted_tokens_are_cached() -> None:
    bench = Bench(num_speculative_tokens=5)
    bench.worker.num_accepted = 2
    bench.add("a", range(10, 14), max_tokens=9)
    bench.run()
    again = bench.add("b", [*range(10, 14), *[7] * 9, 99], arrival=1.0)
    bench.step()
    assert again.num_cached_tokens == 12, "all but the last token, whose KV was never computed"


def test_disabled_speculation_has_no_stats() -> None:
    bench = Bench()
    bench.add("a", range(10, 14))
    bench.run()
    assert bench.scheduler.speculation.stats() is None


def run_timed(bench: Bench, num_steps: int, draft_s: float) -> list[int]:
    """Return the draft tokens of each step; a step takes 10 ms plus ``draft_s`` per draft token."""
    drafted, now = [], 0.0
    for _ in range(num_steps):
        bench.scheduler.expire(now)
        plan = bench.scheduler.schedule()
        num_drafts = sum(sequence.num_draft_tokens for sequence in plan.sequences)
        drafted.append(num_drafts)
        now += 0.010 + draft_s * num_drafts
        bench.scheduler.update(plan, bench.worker.execute(plan), now)
    return drafted


def timed_bench(**limits: int) -> Bench:
    bench = Bench(
        num_blocks=2000,
        num_speculative_tokens=NUM_DRAFT_TOKENS,
        max_model_len=4000,
        eos_token_ids=frozenset(),
        **limits,
    )
    for index in range(4):
        bench.add(f"r{index}", [10 * index], max_tokens=3900)
    return bench


def test_drafting_stops_when_it_lowers_throughput() -> None:
    bench = timed_bench()
    bench.worker.num_accepted = 1  # and 2, 3, 0 for the others: 10 tokens instead of 4
    drafted = run_timed(bench, 400, draft_s=0.010)
    assert sum(drafted[-200:]) < 0.1 * 200 * 12, "they take thirteen times as long"
    assert any(drafted[:10])


def test_drafting_continues_while_it_raises_throughput() -> None:
    bench = timed_bench()
    bench.worker.num_accepted = 1
    drafted = run_timed(bench, 100, draft_s=0.0001)
    assert sum(1 for count in drafted[1:] if count) > 90


def test_drafting_is_retried_when_it_becomes_worthwhile() -> None:
    worth = DraftGate()

    def run(num_steps: int, tokens_per_draft_step: int) -> int:
        count = 0
        for _ in range(num_steps):
            is_drafted = worth.allows
            count += is_drafted
            worth.learn(tokens_per_draft_step if is_drafted else 10, is_drafted, 1, 1.0)
        return count

    assert run(300, 5) < 60
    run(600, 20)
    assert run(100, 20) > 90


def test_single_slow_steps_do_not_stop_drafting() -> None:
    worth = DraftGate()
    num_drafted = 0
    for index in range(300):
        is_drafted = worth.allows
        worth.learn(20 if is_drafted else 10, is_drafted, 1, 50.0 if index % 7 == 0 else 1.0)
        num_drafted += index >= 200 and is_drafted
    assert num_drafted >= 94


def test_no_probe_step_without_drafts_while_all_are_accepted() -> None:
    worth = DraftGate()
    for _ in range(100):
        assert worth.allows
        worth.learn(20, 16, 0, 1.0)
    allowed = []
    for _ in range(8):
        worth.learn(19, 16, 1, 1.0)
        allowed.append(worth.allows)
    assert not all(allowed)


def test_probe_steps_without_drafts_are_consecutive() -> None:
    """The first of them starts when a step with drafts has completed, at any depth of the
    pipeline."""
    worth, allowed = DraftGate(), []
    for _ in range(200):
        allowed.append(worth.allows)
        worth.learn(20 if worth.allows else 10, worth.allows, 1, 1.0)
    without = [index for index, is_drafted in enumerate(allowed) if not is_drafted]
    assert without == [5, 6, 7, 93, 94, 95, 189, 190, 191]


def test_max_seqs_with_drafts_disables_drafts_in_larger_steps() -> None:
    bench = timed_bench(max_seqs_with_drafts=3)
    bench.step()
    assert sum(s.num_draft_tokens for s in bench.step()[0].sequences) == 0
    bench.scheduler.abort("r3")
    assert sum(s.num_draft_tokens for s in bench.step()[0].sequences) > 0
