"""No reservation outlives its request, however the request, its owner or an instance ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from support.conductor_fleets import ask, hold, make_conductor

from mooncake_conductor.errors import UnknownInstance
from mooncake_conductor.fleet import InstanceSpec, Role
from mooncake_conductor.reservations import MAX_ENDED_DEADLINES

ENDINGS = ("finished", "ended", "late", "deadline", "owner", "prefill gone", "decode gone", "again")


def follow(conductor, name: str, stage: int, ending: str, now: float) -> None:
    """Advance a request to a stage (0 queued, 1 prefilled, 2 decoding), and end it."""
    if stage >= 1:
        conductor.prefilled(name, now + 1.0)
    if stage >= 2:
        conductor.joined(name, now + 2.0)
    if ending == "finished":
        conductor.finished(name, now + 3.0)
    elif ending == "again":
        conductor.route(ask(name, 3, owner="proxy"), now + 3.0)
        conductor.ended(name, now + 4.0)
    elif ending in ("ended", "late"):
        conductor.ended(name, now + 3.0)
        conductor.ended(name, now + 3.0)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ENDINGS)), max_size=30))
@settings(deadline=None, max_examples=150)
def test_no_ending_leaves_a_reservation(requests) -> None:
    conductor = make_conductor(3, 2)
    for number, (stage, ending) in enumerate(requests):
        name, now = f"r{number}", 10.0 * number
        conductor.route(ask(name, 3, first=100 * number, owner="proxy"), now)
        follow(conductor, name, stage, ending, now)
        if ending == "owner":
            conductor.book.release_owner("proxy", now + 3.0)
        elif ending == "prefill gone":
            gone = int(conductor.fleet.prefill_slots[0])
            latency = InstanceSpec("p", Role.PREFILL, _latency(conductor, gone))
            conductor.remove(gone, now + 3.0)
            conductor.fleet.add(latency) if "p" not in conductor.fleet.names.values() else None
            conductor.fleet.add(
                InstanceSpec(f"new {number}", Role.PREFILL, latency.latency)
            ) if not len(conductor.fleet.prefill_slots) else None
        elif ending == "decode gone":
            conductor.book.release_slot(int(conductor.fleet.decode_slots[0]), now + 3.0)
    conductor.book.sweep(1e9)
    queues = conductor.fleet.queues
    assert (len(conductor.book), len(conductor.ledger)) == (0, 0)
    assert not queues.num_requests.any()
    assert not queues.num_tokens.any()
    assert not queues.seconds(conductor.fleet.prefill_slots, now=1e9).any()
    assert conductor.ledger.at(1e9).num_sequences.sum() == 0
    assert not any(conductor.index._predictions._by_slot)
    assert not conductor.index._predictions._masks


@pytest.mark.parametrize("binds_late", [True, False])
def test_kv_transfer_reserves_the_links(binds_late) -> None:
    conductor = make_conductor(1, 1, binds_late=binds_late)
    links, request = conductor.fleet.links, ask("r", 40)
    compute = conductor.route(request, 0.0).prefill.compute
    conductor.prefilled("r", compute)
    moved = request.num_tokens * conductor.fleet.kv_bytes_per_token / links.bytes_per_s[0]
    begun = compute if binds_late else 0.0  # pushed while the prompt is computed
    expected = pytest.approx(begun + links.setup_s + moved)
    assert (links.sending_until[0], links.receiving_until[1]) == (expected, expected)
    conductor.joined("r", compute + 0.01)
    assert max(links.sending_until[0], links.receiving_until[1]) <= compute + 0.01


@pytest.mark.parametrize("ending", ["ended", "finished", "decode gone", "again"])
def test_cancelled_transfer_releases_its_links(ending) -> None:
    conductor = make_conductor(1, 2, binds_late=True)
    conductor.route(ask("r", 4000), 0.0)
    _, slot = conductor.prefilled("r", 1.0)
    links = conductor.fleet.links
    assert links.sending_until[0] > 60.0
    if ending == "decode gone":
        conductor.book.release_slot(slot, 2.0)
    follow(conductor, "r", 1, ending, 1.0)
    assert links.sending_until[0] <= 5.0
    assert links.receiving_until.max() <= 5.0


def test_tokens_cached_at_the_decode_instance_are_not_transferred() -> None:
    conductor = make_conductor(1, 2, binds_late=True)
    hold(conductor, 2, 40)
    conductor.route(ask("r", 40), 0.0)
    assert conductor.prefilled("r", 1.0)[1] == 2
    assert conductor.fleet.links.receiving_until[2] < 1.01


def _latency(conductor, slot: int):
    from mooncake_conductor.cost.latency_model import LatencyModel

    return LatencyModel(*conductor.fleet.prefill[:, slot], *conductor.fleet.step[:, slot])


def test_queue_is_the_reserved_time_minus_the_elapsed() -> None:
    conductor = make_conductor(1)
    queues, slots = conductor.fleet.queues, conductor.fleet.prefill_slots
    queues.enter(0, "a", 2.0, 10, now=0.0)
    queues.enter(0, "b", 3.0, 20, now=0.5)
    assert queues.seconds(slots, now=1.0)[0] == pytest.approx(4.0)
    assert queues.seconds(slots, now=9.0)[0] == pytest.approx(3.0)  # "a" is late, not done
    queues.leave(0, "a", now=9.0)
    assert queues.seconds(slots, now=9.0)[0] == pytest.approx(3.0)
    assert queues.seconds(slots, now=10.0)[0] == pytest.approx(2.0)
    queues.leave(0, "b", now=10.0)
    queues.leave(0, "b", now=10.0)
    assert (queues.seconds(slots, now=10.0)[0], queues.num_tokens[0]) == (0.0, 0.0)


def test_slot_is_reused_and_reports_for_a_removed_one_are_rejected() -> None:
    conductor = make_conductor(2, 1)
    conductor.remove(0, now=0.0)
    with pytest.raises(UnknownInstance, match="slot 0"):
        conductor.measured_prefill(0, 100, 0, 1.0)
    with pytest.raises(UnknownInstance, match="slot 0"):
        conductor.fleet.remove(0, now=0.0)
    spec = InstanceSpec("again", Role.PREFILL, _latency(conductor, 1))
    assert conductor.add(spec) == 0
    conductor.measured_prefill(0, 100, 0, 1.0)


def test_costs_follow_the_reports_of_an_instance() -> None:
    conductor = make_conductor(1)
    for number in range(200):
        tokens = 1000 + 137 * (number % 50)
        conductor.measured_prefill(0, tokens, 0, 0.5 + 3e-4 * tokens)
    found = conductor.fleet.prefill_seconds(0, 4000, 0)
    assert found == pytest.approx(0.5 + 3e-4 * 4000, rel=0.05)


def test_deadlines_of_ended_reservations_are_dropped_before_they_pass() -> None:
    """They are an hour away: a busy proxy places many requests in that time."""
    conductor = make_conductor(1, 1)
    for number in range(3 * MAX_ENDED_DEADLINES):
        conductor.route(ask(f"r{number}", 1), 0.0)
        if number:
            conductor.finished(f"r{number}", 0.0)
    assert len(conductor.book._deadlines) <= MAX_ENDED_DEADLINES + 2
    assert conductor.book.sweep(1e9) == ["r0"]
