"""The prefix cache: digests, sharing, hit counts, eviction from the tail, reset."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.scheduling import Bench

from mooncake_engine.kv_cache.block_pool import extend_block_hashes
from mooncake_engine.messages import LOCAL_HIT
from mooncake_engine.scheduling.request import Request, RequestStatus

PROMPT = list(range(10, 26))
"""Four full blocks of four tokens."""


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_digests_are_equal_in_every_process(hash_seed: str) -> None:
    here: list[bytes] = []
    extend_block_hashes(here, PROMPT, 4)
    script = (
        "from mooncake_engine.kv_cache.block_pool import extend_block_hashes\n"
        f"chain = []\nextend_block_hashes(chain, {PROMPT}, 4)\n"
        "print(*[digest.hex() for digest in chain])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=True
    )
    assert there.stdout.decode().split() == [digest.hex() for digest in here]
    assert here[0].hex() == "6b9d96e3898df6e68ebb283d6fa05b73"


def test_digest_depends_on_all_preceding_tokens() -> None:
    chains: list[list[bytes]] = [[], [], []]
    for chain, first in zip(chains, (10, 11, 10), strict=True):
        extend_block_hashes(chain, [first, *PROMPT[1:]], 4)
    assert chains[0] == chains[2]
    assert not set(chains[0]) & set(chains[1])


def test_chain_is_extended_incrementally() -> None:
    chain: list[bytes] = []
    for length in (3, 4, 9, 16):
        extend_block_hashes(chain, PROMPT[:length], 4)
        assert len(chain) == length // 4


def test_equal_blocks_completed_by_decodes_are_shared() -> None:
    bench = Bench(num_blocks=32)
    both = [bench.add(f"r{index}", PROMPT[:7], max_tokens=14) for index in range(2)]
    bench.step()  # both compute the prompt: neither finds the other's blocks
    first, second = both
    assert second.block_ids[0] == first.block_ids[0], "the prompt's full block is duplicated"
    for _ in range(12):
        bench.step()
        full = first.num_computed // 4
        assert second.block_ids[:full] == first.block_ids[:full]
    assert bench.scheduler.blocks.num_shared_blocks == full == 4
    assert bench.run()
    assert bench.num_free == 32


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_replaced_block_is_freed_when_no_step_in_flight_reads_it(depth: int) -> None:
    bench = Bench(
        num_blocks=32, depth=depth, uses_async_scheduling=depth > 1, eos_token_ids=frozenset()
    )
    for index in range(2):
        bench.add(f"r{index}", PROMPT[:7], max_tokens=40)
    answers = bench.run()
    assert answers == {"r0": [7] * 40, "r1": [7] * 40}
    assert bench.scheduler.blocks.num_shared_blocks > 5
    assert bench.scheduler.num_held_tables == 0
    assert bench.num_free == 32


def test_blocks_sent_to_a_peer_are_not_replaced() -> None:
    bench = Bench(num_blocks=32)
    bench.add("kept", PROMPT[:8], max_tokens=4)
    bench.add("sent", PROMPT[:8], sends_kv=True)
    bench.step()
    assert bench.scheduler.blocks.num_shared_blocks == 0


def test_hits_are_counted_per_request_and_in_total() -> None:
    bench = Bench()
    bench.add("a", PROMPT, max_tokens=1)
    bench.run()
    bench.add("b", [*PROMPT[:8], 99, 98], max_tokens=1)
    _, updates = bench.step()
    assert updates[0].num_cached_tokens == 8
    assert bench.scheduler.blocks.num_hit_tokens == 8
    assert bench.scheduler.blocks.num_queried_tokens == 26


def test_tail_of_a_chain_is_evicted_first() -> None:
    bench = Bench(6)
    bench.add("a", PROMPT, max_tokens=1)
    bench.run()
    bench.add("other", range(50, 66), max_tokens=1)  # takes the two empty blocks and a's last two
    bench.run()
    bench.add("again", PROMPT, max_tokens=1)
    _, updates = bench.step()
    assert updates[0].num_cached_tokens == 8


def test_reset_clears_the_cache_only_while_idle() -> None:
    bench = Bench()
    bench.add("a", PROMPT, max_tokens=2)
    bench.step()
    assert not bench.scheduler.reset_prefix_cache()
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.scheduler.check_integrity()
    bench.add("again", PROMPT, max_tokens=1)
    _, updates = bench.step()
    assert updates[0].num_cached_tokens == 0


def test_disabled_caching_keeps_no_prefix() -> None:
    bench = Bench(prefix_caching=False)
    for name in ("a", "b"):
        bench.add(name, PROMPT, max_tokens=1)
        _, updates = bench.step()
        assert updates[0].num_cached_tokens == 0


def waiting_for_blocks(bench: Bench, **kind: bool) -> Request:
    """A request whose prefix of 20 blocks is cached, but that does not fit beside one that runs."""
    document = list(range(100, 180))
    bench.add("first", document, max_tokens=1)
    bench.run()
    bench.add("runs", range(300, 380), max_tokens=60)
    bench.step()
    return bench.add("again", [*document, *range(400, 460)], arrival=1.0, max_tokens=2, **kind)


@pytest.mark.parametrize("kind", [{}, {"pulls_kv": True}])
def test_prefix_of_a_request_that_does_not_fit_is_looked_up_once(
    kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(48, max_num_batched_tokens=200)
    request = waiting_for_blocks(bench, **kind)
    pool, lookups = bench.scheduler.blocks.pool, []
    find = pool.find
    monkeypatch.setattr(pool, "find", lambda digests: lookups.append(len(digests)) or find(digests))
    for _ in range(20):  # the one that runs takes free blocks, and caches its own
        bench.step()
    assert request.status in (RequestStatus.WAITING, RequestStatus.PREALLOCATING)
    assert len(lookups) == 1
    bench.scheduler.abort("runs")
    bench.step()
    assert request.status in (RequestStatus.RUNNING, RequestStatus.TRANSFERRING)
    assert request.prompt_hits == {LOCAL_HIT: 80}


def test_request_begins_as_soon_as_enough_of_its_prompt_is_cached_by_another() -> None:
    bench = Bench(24, prefill_chunk_size=8)
    prompt = range(100, 168)
    bench.add("computes", prompt)
    bench.step()
    waits = bench.add("waits", prompt, arrival=1.0)
    num_steps = 1
    while waits.status is not RequestStatus.RUNNING:
        assert bench.num_free == 7
        bench.step()
        num_steps += 1
    assert num_steps == 6  # five have computed the ten blocks that it lacks
    assert waits.num_cached_tokens == 40


def test_request_begins_when_a_missing_block_of_its_prefix_is_cached() -> None:
    """Those behind it are in use by others, so few free blocks suffice then."""
    bench = Bench(24)
    request = bench.add("waits", range(100, 165))
    extend_block_hashes(request.block_hashes, request.token_ids, 4)
    pool = bench.scheduler.blocks.pool
    owned = pool.allocate(16)
    assert owned is not None
    for block_id, digest in list(zip(owned, request.block_hashes, strict=True))[1:]:
        pool.publish(block_id, digest)
    bench.submit()
    assert request.status is RequestStatus.WAITING
    pool.publish(owned[0], request.block_hashes[0])
    bench.submit()
    assert request.status is RequestStatus.RUNNING
    assert request.num_cached_tokens == 64


@pytest.mark.parametrize("is_evicted", [False, True])
def test_request_begins_when_its_free_prefix_is_in_use_again(is_evicted: bool) -> None:
    """Another request shares the cached blocks, or caches blocks of its own after an eviction."""
    bench = Bench(24)
    request = bench.add("waits", range(100, 165))
    extend_block_hashes(request.block_hashes, request.token_ids, 4)
    pool = bench.scheduler.blocks.pool
    cached, others = pool.allocate(16), pool.allocate(8)
    assert cached is not None
    assert others is not None
    for block_id, digest in zip(cached, request.block_hashes, strict=True):
        pool.publish(block_id, digest)
    pool.release(cached)
    bench.submit()
    assert request.status is RequestStatus.WAITING
    if is_evicted:
        for block_id, digest in zip(pool.allocate(16) or (), request.block_hashes, strict=True):
            pool.publish(block_id, digest)
    else:
        pool.share(cached)
    bench.submit()
    assert request.status is RequestStatus.WAITING
    pool.release(others[:1])
    bench.submit()
    assert request.status is RequestStatus.RUNNING
    assert request.num_cached_tokens == 64
