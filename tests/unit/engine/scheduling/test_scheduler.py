"""The scheduler as pure code: block accounting stays right through any event."""

from __future__ import annotations

import pytest
from support.scheduling import EOS, RecordingConnector, make_request

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import SampledToken, StepPlan, StepResult
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import FirstToken


def make_scheduler(
    num_blocks: int = 16,
    *,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 8,
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
) -> tuple[Scheduler, RecordingConnector]:
    connector = RecordingConnector()
    limits = SchedulerLimits(
        max_num_seqs, budget, num_blocks * block_size, frozenset({EOS}), policy
    )
    blocks = BlockManager(num_blocks, block_size, prefix_caching=True)
    return Scheduler(limits, blocks, connector), connector


def run_step(scheduler: Scheduler, token: int = 7) -> tuple[StepPlan, list[TokenUpdate]]:
    plan = scheduler.schedule()
    tokens = {s.request_id: (SampledToken(token),) for s in plan.sequences if s.is_sampling}
    updates = scheduler.update(plan, StepResult(plan.step, tokens))
    scheduler.check_integrity()
    return plan, updates


def test_prompt_runs_in_chunks_and_samples_after_the_last() -> None:
    scheduler, _ = make_scheduler(budget=6)
    scheduler.add(make_request("a", list(range(10, 24))))
    shares = []
    for _ in range(4):
        plan, updates = run_step(scheduler)
        shares.append((plan.sequences[0].start, plan.sequences[0].count, len(updates)))
    assert shares == [(0, 6, 0), (6, 6, 0), (12, 2, 1), (14, 1, 1)]


def test_decodes_precede_prefills_in_a_plan() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [10, 11, 12]))
    run_step(scheduler)
    scheduler.add(make_request("b", [20, 21, 22, 23], arrival=1.0))
    plan, _ = run_step(scheduler)
    assert [(s.request_id, s.count) for s in plan.sequences] == [("a", 1), ("b", 4)]


def test_finished_prompt_is_reused_except_its_last_block() -> None:
    scheduler, _ = make_scheduler()
    prompt = list(range(10, 22))
    scheduler.add(make_request("a", prompt, max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("b", prompt, max_tokens=1))
    plan, updates = run_step(scheduler)
    assert (plan.sequences[0].start, plan.sequences[0].count) == (8, 4)
    assert updates[0].num_cached_tokens == 8


@pytest.mark.parametrize(("token", "finish"), [(EOS, FinishReason.STOP), (7, FinishReason.LENGTH)])
def test_answer_finishes_by_eos_or_length(token: int, finish: FinishReason) -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", [10], max_tokens=1))
    _, updates = run_step(scheduler, token)
    assert [update.finish for update in updates] == [finish]
    assert scheduler.blocks.pool.num_free == 16


def test_newest_request_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler, _ = make_scheduler(num_blocks=4)
    scheduler.add(make_request("old", list(range(10, 17)), arrival=0.0))
    scheduler.add(make_request("new", list(range(30, 37)), arrival=1.0))
    run_step(scheduler)
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert [s.request_id for s in plan.sequences] == ["old"]
    assert scheduler.num_preemptions == 1
    plan, _ = run_step(scheduler)
    assert plan.removed == ("new",) or scheduler.num_waiting == 1
    scheduler.abort("old")
    plan, _ = run_step(scheduler)
    assert plan.new_requests[0].request_id == "new"
    assert len(plan.new_requests[0].token_ids) == 9


def test_stop_token_of_a_prefill_that_is_sent_to_a_peer_is_reported() -> None:
    """Without it the token's text would be part of the answer."""
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("p", [10], sends_kv=True))
    _, [update] = run_step(scheduler, EOS)
    assert (update.finish, update.stop_token_id) == (FinishReason.STOP, EOS)
    assert "p" in connector.offered, "its blocks are held"


def test_prefill_for_a_peer_keeps_its_blocks_until_released() -> None:
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("p", list(range(10, 20)), keeps_kv=True))
    _, updates = run_step(scheduler)
    assert updates[0].finish is FinishReason.LENGTH
    assert updates[0].kv_transfer_params == {"do_remote_prefill": True, "remote_request_id": "p"}
    assert len(connector.offered["p"]) == 3
    assert scheduler.blocks.pool.num_free == 13
    scheduler.abort("p")
    assert connector.withdrawn == ["p"]
    scheduler.release("p")
    scheduler.release("p")
    scheduler.check_integrity()
    assert scheduler.blocks.pool.num_free == 16


def test_prefill_that_finishes_by_eos_keeps_no_blocks() -> None:
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("p", [10, 11], keeps_kv=True))
    _, updates = run_step(scheduler, EOS)
    assert updates[0].finish is FinishReason.STOP
    assert updates[0].kv_transfer_params is None
    assert not connector.offered


def test_decode_continues_from_the_peers_token_without_the_prompt() -> None:
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("d", list(range(10, 20)), first_token=5))
    _, updates = run_step(scheduler)
    assert updates[0].token_ids == (5,)
    assert connector.loading == {"d": 0}
    assert not run_step(scheduler)[0].sequences
    scheduler.handle_load_ended("d", None)
    plan, updates = run_step(scheduler)
    assert (plan.sequences[0].start, plan.sequences[0].count) == (10, 1)
    assert updates[0].token_ids == (7,)


def test_blocks_cached_by_the_decode_instance_are_not_loaded() -> None:
    scheduler, connector = make_scheduler()
    prompt = list(range(10, 22))
    scheduler.add(make_request("a", prompt, max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("d", prompt, first_token=5))
    run_step(scheduler)
    assert connector.loading == {"d": 12}


def test_failed_load_is_recomputed_and_keeps_the_delivered_token() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("d", list(range(10, 20)), first_token=5))
    run_step(scheduler)
    scheduler.handle_load_ended("d", "peer lost")
    plan, _ = run_step(scheduler)
    assert plan.new_requests[0].token_ids == (*range(10, 20), 5)
    assert (plan.sequences[0].start, plan.sequences[0].count) == (0, 11)


def test_failed_load_fails_the_request_under_policy_fail() -> None:
    scheduler, _ = make_scheduler(policy=LoadFailurePolicy.FAIL)
    scheduler.add(make_request("d", list(range(10, 20)), first_token=5))
    run_step(scheduler)
    scheduler.handle_load_ended("d", "peer lost")
    updates = scheduler.take_updates()
    assert updates[0].finish is FinishReason.ERROR
    assert updates[0].error == "the prompt's KV did not arrive: peer lost"
    scheduler.check_integrity()
    assert scheduler.blocks.pool.num_free == 16


def test_blocks_of_an_aborted_load_are_kept_until_it_drains() -> None:
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("d", list(range(10, 20)), first_token=5))
    run_step(scheduler)
    scheduler.abort("d")
    assert connector.cancelled == {"d"}
    assert scheduler.blocks.pool.num_free == 13
    scheduler.handle_load_ended("d", "cancelled")
    scheduler.check_integrity()
    assert scheduler.blocks.pool.num_free == 16


def test_load_without_blocks_fails_at_its_deadline() -> None:
    scheduler, _ = make_scheduler(num_blocks=4, policy=LoadFailurePolicy.FAIL)
    scheduler.add(make_request("p", list(range(10, 22)), keeps_kv=True))
    run_step(scheduler)
    scheduler.add(make_request("d", list(range(50, 60)), first_token=5, arrival=100.0))
    run_step(scheduler)
    scheduler.expire(now=221.0)
    assert [u.error for u in scheduler.take_updates()] == [
        "the prompt's KV did not arrive: no KV blocks became free for the load within 120 s"
    ]


def test_first_token_received_with_the_kv_starts_the_answer() -> None:
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("d", list(range(10, 20)), receives_kv=True))
    _, updates = run_step(scheduler)
    assert connector.loading == {"d": 0}
    assert not updates
    scheduler.handle_load_ended("d", None, first_token=FirstToken(5, num_cached_tokens=4))
    plan, updates = run_step(scheduler)
    assert plan.new_requests[0].token_ids == (*range(10, 20), 5)
    assert (plan.sequences[0].start, plan.sequences[0].count) == (10, 1)
    assert [update.token_ids for update in updates] == [(5,), (7,)]
    assert updates[0].num_cached_tokens == 4
    assert all(update.times and update.times.has_peer_token for update in updates)


def test_answer_may_finish_with_the_received_token() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("d", list(range(10, 20)), receives_kv=True))
    run_step(scheduler)
    scheduler.handle_load_ended("d", None, first_token=FirstToken(EOS))
    plan, updates = run_step(scheduler)
    assert not plan.sequences
    assert [(update.token_ids, update.finish) for update in updates] == [
        ((EOS,), FinishReason.STOP)
    ]
    assert scheduler.blocks.pool.num_free == 16


def test_undrained_failed_load_is_recomputed_in_other_blocks() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("d", list(range(10, 20)), receives_kv=True))
    run_step(scheduler)
    assert scheduler.blocks.pool.num_free == 13
    scheduler.handle_load_ended("d", "silent peer", is_drained=False)
    plan, _ = run_step(scheduler)
    assert (plan.sequences[0].start, plan.sequences[0].count) == (0, 10)
    assert scheduler.blocks.pool.num_free == 10
    scheduler.handle_load_ended("d", "silent peer", is_drained=False)
    assert scheduler.num_held_tables == 1
    scheduler.handle_load_ended("d", "the peer is dead")
    scheduler.check_integrity()
    assert scheduler.blocks.pool.num_free == 13


@pytest.mark.parametrize("token", [7, EOS])
def test_sending_prefill_is_announced_and_holds_its_blocks(token: int) -> None:
    scheduler, connector = make_scheduler()
    scheduler.add(make_request("p", list(range(10, 20)), sends_kv=True))
    assert connector.announced == {"p"}
    plan, updates = run_step(scheduler, token)
    assert plan.new_requests[0].sends_kv
    assert updates[0].kv_transfer_params is None
    assert len(connector.offered["p"]) == 3
    assert scheduler.blocks.pool.num_free == 13
    scheduler.release("p")
    assert scheduler.blocks.pool.num_free == 16


def test_aborted_sending_prefill_holds_its_blocks_until_released() -> None:
    scheduler, connector = make_scheduler(budget=6)
    scheduler.add(make_request("p", list(range(10, 20)), sends_kv=True))
    run_step(scheduler)
    scheduler.abort("p")
    assert connector.withdrawn == ["p"]
    assert not connector.offered
    assert scheduler.blocks.pool.num_free == 13
    scheduler.release("p")
    scheduler.check_integrity()
    assert scheduler.blocks.pool.num_free == 16
