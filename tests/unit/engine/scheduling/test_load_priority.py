"""Loads of a peer's KV and plain requests get blocks in one order of priority."""

from __future__ import annotations

from support.scheduling import Bench

from mooncake_engine.scheduling.request import RequestStatus

NO_EOS: frozenset[int] = frozenset()


def full_bench() -> Bench:
    """Ten blocks, of which one request holds six: a prompt of 24 tokens has to wait."""
    bench = Bench(10, max_num_seqs=8, token=None, eos_token_ids=NO_EOS)
    bench.add("first", range(24), max_tokens=8)
    bench.step()
    return bench


def state(bench: Bench, name: str) -> RequestStatus:
    return bench.scheduler._queues.requests[name].status


def test_waiting_younger_request_does_not_delay_a_load() -> None:
    bench = full_bench()
    bench.add("loaded", [90], arrival=1.0, first_token=5, max_tokens=4)
    bench.add("younger", range(50, 74), arrival=2.0)
    bench.step()
    assert state(bench, "younger") is RequestStatus.WAITING
    assert state(bench, "loaded") is not RequestStatus.PREALLOCATING


def test_load_does_not_overtake_an_older_waiting_request() -> None:
    bench = full_bench()
    bench.add("older", range(50, 74), arrival=1.0)
    bench.add("loaded", [90], arrival=2.0, first_token=5, max_tokens=4)
    bench.step()
    assert state(bench, "older") is RequestStatus.WAITING
    assert state(bench, "loaded") is RequestStatus.PREALLOCATING
