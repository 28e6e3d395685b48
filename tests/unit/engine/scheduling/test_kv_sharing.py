"""Which requests share KV in the prefix cache, and which must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduling import EOS, Bench, RecordingConnector, make_request

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.kv_cache.block_pool import ROOT, extend_block_hashes, root_of
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import SampledToken, StepResult

PROMPT = list(range(10, 22))


def make_scheduler() -> Scheduler:
    limits = SchedulerLimits(8, 64, 64, frozenset({EOS}))
    return Scheduler(limits, BlockManager(32, 4, prefix_caching=True), RecordingConnector())


def salted(name: str, salt: str) -> Request:
    request = make_request(name, PROMPT, max_tokens=1)
    return Request(replace(request.spec, cache_salt=salt), 0, 0.0)


def run(scheduler: Scheduler) -> int:
    """Run until all requests have finished; return the cached prompt tokens of the last step that
    ran a prompt."""
    cached = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        tokens = {s.request_id: (SampledToken(7),) for s in plan.sequences if s.is_sampling}
        updates = scheduler.update(plan, StepResult(plan.step, tokens))
        cached = max([cached, *(update.num_cached_tokens for update in updates)])
        scheduler.check_integrity()
    return cached


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [("", "", 8), ("a", "a", 8), ("a", "b", 0), ("", "a", 0), ("a", "", 0), ("a", "aa", 0)],
)
def test_only_requests_with_equal_salts_share_kv(first: str, second: str, num_cached: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(salted("x", first))
    run(scheduler)
    scheduler.add(salted("y", second))
    assert run(scheduler) == num_cached


def test_chains_of_two_salts_share_no_block() -> None:
    chains = []
    for salt in ("", "a", "b", "\x00", "a" * 1024):
        chain: list[bytes] = []
        for length in (4, 8, 12):  # extended step by step, as answers are
            extend_block_hashes(chain, PROMPT[:length], 4, salt)
        chains.append(chain)
    names = [name for chain in chains for name in chain]
    assert len(set(names)) == len(names) == 15


def test_empty_salt_is_the_default_chain() -> None:
    assert root_of("") == ROOT


def test_prompt_tokens_are_counted_by_source_once_a_request_runs() -> None:
    bench = Bench(num_blocks=32)
    for name in ("a", "b"):
        bench.add(name, PROMPT, max_tokens=2, group="g")
    assert sum(bench.scheduler.prompt_tokens_by_source.values()) == 0, "none has run"
    bench.run()
    found = {"local_compute": len(PROMPT), "local_cache_hit": len(PROMPT)}
    assert nonzero(bench) == found
    bench.add("d", [*PROMPT, 1, 2, 3, 4], first_token=5, max_tokens=3)
    bench.step()
    bench.end_load("d", None)
    bench.run()
    num_local = len(PROMPT) // 4 * 4
    found = found | {"local_cache_hit": len(PROMPT) + num_local, "p2p": len(PROMPT) + 4 - num_local}
    assert nonzero(bench) == found


def nonzero(bench: Bench) -> dict[str, int]:
    return {name: n for name, n in bench.scheduler.prompt_tokens_by_source.items() if n}


@pytest.mark.parametrize(("is_verified", "num_cached"), [(True, 8), (False, 0)])
def test_unverified_kv_of_a_peer_is_not_shared(is_verified: bool, num_cached: int) -> None:
    scheduler = make_scheduler()
    loading = make_request("d", PROMPT, first_token=5, max_tokens=9)
    params = replace(loading.spec.kv_transfer_params, is_verified=is_verified)
    scheduler.add(Request(replace(loading.spec, kv_transfer_params=params), 0, 0.0))
    scheduler.update(scheduler.schedule(), StepResult(0, {}))
    scheduler.handle_load_ended("d", None)
    run(scheduler)
    scheduler.add(make_request("x", PROMPT, max_tokens=1))
    assert run(scheduler) == num_cached
