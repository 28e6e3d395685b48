"""Drafts take what a step has to spare, and dequeue nothing behind that was not accepted."""

from __future__ import annotations

import pytest
from support.scheduling import EOS, Bench, token_of

from mooncake_engine.messages import FinishReason, SpeculationStats
from mooncake_engine.scheduling.draft_scheduling import DraftWorth

NUM_DRAFT_TOKENS = 3


def test_accepted_drafts_come_together() -> None:
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
    assert stats == SpeculationStats(2, 5, (2, 2, 0)), "one less is tried where not all came true"


def test_no_drafts_before_an_answer_has_begun_nor_beyond_its_end() -> None:
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS)
    bench.add("a", [10], max_tokens=5)
    assert [bench.step()[0].sequences[0].num_draft_tokens for _ in range(5)] == [0, 3, 2, 1, 0]
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS, max_model_len=9)
    bench.add("b", range(10, 16), max_tokens=50)
    assert [bench.step()[0].sequences[0].num_draft_tokens for _ in range(3)] == [0, 1, 0]
    assert bench.scheduler.num_running == 0


def test_blocks_lent_for_rejected_drafts_are_free_after_the_step() -> None:
    bench = Bench(num_speculative_tokens=9)
    request = bench.add("a", range(10, 17), max_tokens=30)
    bench.step()
    plan, _ = bench.step()
    assert len(plan.sequences[0].new_block_ids) == 3, "17 tokens in blocks of 4, two are there"
    assert len(request.block_ids) == 2
    assert bench.num_free == 14
    plan, _ = bench.step()
    assert plan.sequences[0].new_blocks_at == 2, "the workers have longer tables"


def test_drafts_wait_behind_prompts() -> None:
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
    ], "none of a's came true"


def test_a_sequence_that_can_not_be_drafted_runs_alone_for_a_while() -> None:
    bench = Bench(num_speculative_tokens=NUM_DRAFT_TOKENS)
    bench.add("a", [10], max_tokens=30)
    drafted = [bench.step()[0].sequences[0].num_draft_tokens for _ in range(12)]
    assert drafted == [0, 3, 2, 1, 0, 1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_accepted", [0, 3])
@pytest.mark.parametrize("num_steps", range(6))
def test_a_choice_from_a_peer_comes_while_another_one_drafts(
    num_steps: int, num_accepted: int, depth: int
) -> None:
    """It shares the prompt's last block, which the other one has yet to part from."""
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
    """A pool that two requests fill to the last block, with drafts that would want more."""
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


def test_what_follows_an_end_is_dropped() -> None:
    bench = Bench(num_speculative_tokens=5, token=EOS)
    bench.add("a", [10, 11], max_tokens=20)
    bench.worker.token = 7
    bench.step()
    bench.worker.token, bench.worker.num_accepted = EOS, 5
    _, updates = bench.step()
    assert updates[0].token_ids == (EOS,)
    assert updates[0].finish is FinishReason.STOP
    assert bench.num_free == 16


def test_only_accepted_tokens_are_found_again() -> None:
    bench = Bench(num_speculative_tokens=5)
    bench.worker.num_accepted = 2
    bench.add("a", range(10, 14), max_tokens=9)
    bench.run()
    again = bench.add("b", [*range(10, 14), *[7] * 9, 99], arrival=1.0)
    bench.step()
    assert again.num_cached_tokens == 12, "all but the last token, which nothing was computed for"


def test_off_there_is_nothing_to_tell() -> None:
    bench = Bench()
    bench.add("a", range(10, 14))
    bench.run()
    assert bench.scheduler.speculation.stats() is None


def run_timed(bench: Bench, num_steps: int, draft_s: float) -> list[int]:
    """Drafts allowed in each step; a step takes 10 ms and so much more per draft token."""
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


def test_drafting_stops_where_steps_with_drafts_bring_fewer_tokens_per_second() -> None:
    bench = timed_bench()
    bench.worker.num_accepted = 1  # and 2, 3, 0 of the others: 10 tokens instead of 4
    drafted = run_timed(bench, 400, draft_s=0.010)
    assert sum(drafted[-200:]) < 0.1 * 200 * 12, "they take thirteen times as long"
    assert any(drafted[:10])


def test_drafting_goes_on_where_it_pays() -> None:
    bench = timed_bench()
    bench.worker.num_accepted = 1
    drafted = run_timed(bench, 100, draft_s=0.0001)
    assert sum(1 for count in drafted[1:] if count) > 90


def test_drafts_are_tried_again_when_a_batch_has_become_smaller_or_faster() -> None:
    worth = DraftWorth()

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


def test_one_slow_step_proves_nothing() -> None:
    worth = DraftWorth()
    num_drafted = 0
    for index in range(300):
        is_drafted = worth.allows
        worth.learn(20 if is_drafted else 10, is_drafted, 1, 50.0 if index % 7 == 0 else 1.0)
        num_drafted += index >= 200 and is_drafted
    assert num_drafted >= 94


def test_no_step_is_left_out_while_every_draft_is_accepted() -> None:
    worth = DraftWorth()
    for _ in range(100):
        assert worth.allows
        worth.learn(20, 16, 0, 1.0)
    allowed = []
    for _ in range(8):
        worth.learn(19, 16, 1, 1.0)
        allowed.append(worth.allows)
    assert not all(allowed)


def test_steps_without_drafts_come_in_a_row() -> None:
    """The first of them begins when one with drafts is over, whatever runs ahead."""
    worth, allowed = DraftWorth(), []
    for _ in range(200):
        allowed.append(worth.allows)
        worth.learn(20 if worth.allows else 10, worth.allows, 1, 1.0)
    without = [index for index, is_drafted in enumerate(allowed) if not is_drafted]
    assert without == [5, 6, 7, 93, 94, 95, 189, 190, 191]


def test_steps_of_more_sequences_than_asked_for_have_no_drafts() -> None:
    bench = timed_bench(max_seqs_with_drafts=3)
    bench.step()
    assert sum(s.num_draft_tokens for s in bench.step()[0].sequences) == 0
    bench.scheduler.abort("r3")
    assert sum(s.num_draft_tokens for s in bench.step()[0].sequences) > 0
