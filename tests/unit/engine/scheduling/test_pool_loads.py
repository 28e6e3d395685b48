"""Loads from the KVCache pool and saves to it, with a pool in this process. Its chunks record the
tokens that they were computed from, which detects wrong loads and failed ones that are used."""

import itertools
import random

import pytest
from support.scheduling import Bench, token_of

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_engine.scheduling import pool_saves
from mooncake_engine.scheduling.pool_loads import (
    MAX_HINT_TIMEOUT_S,
    MIN_HINT_TIMEOUT_S,
    MIN_TIMEOUT_S,
)
from mooncake_engine.scheduling.request import RequestStatus
from mooncake_kv.params import PrefixSource
from mooncake_kv.pool.pool_costs import LoadCosts
from mooncake_kv.pool.pool_events import (
    ChunksCopied,
    ChunksFound,
    ChunkSource,
    LoadReleased,
    PoolLoadEnded,
    PoolStats,
)
from mooncake_kv.store.chunk_keys import KVIdentity, chunk_keys
from mooncake_kv.store.chunk_store import Tier

CHUNK = 8
HOME = ChunkSource(0, Tier.DRAM)
IDENTITY = KVIdentity("model", "float32", CHUNK)


class Pool:
    """A ``ChunkPool`` whose events the test triggers."""

    def __init__(self, answers_at_once=True):
        self.chunk_tokens, self.chunk_bytes, self.num_layers = CHUNK, 1000, 4
        self.transfer_timeout_s, self.always_loads = 30.0, False
        self.publishes_saves = False
        self.stats = PoolStats()
        self.load_costs = LoadCosts()
        self.stored = set()
        self.answers_at_once = answers_at_once
        self.asked, self.loads, self.saves = {}, {}, {}
        self.cancelled, self.late = set(), set()
        self.refuses, self.refused = False, []
        self.hints = []

    def keys(self, request, num_chunks):
        tokens = request.token_ids[: num_chunks * CHUNK]
        return chunk_keys(IDENTITY, tokens, tenant_salt=request.spec.cache_salt)

    def find(self, keys):
        return [HOME for _ in itertools.takewhile(self.stored.__contains__, keys)]

    def lookup(self, load_id, keys, hints=(), timeout_s=0.0):
        self.hints.append((tuple(hints), timeout_s))
        if self.answers_at_once:
            return self.find(keys)
        self.asked[load_id] = keys
        return None

    def start_load(self, load):
        self.loads[load.load_id] = load

    def cancel_load(self, load_id, *, is_late=False):
        self.cancelled.add(load_id)
        if is_late:
            self.late.add(load_id)

    def save(self, save):
        if self.refuses:
            self.refused.append(save)
            return False
        self.saves[save.save_id] = save
        return True

    def end_save(self, save_id, *, is_unchanged):
        save = self.saves.pop(save_id)
        if is_unchanged:
            self.stored.update(save.keys[save.first_chunk :])


class PoolBench(Bench):
    """A bench with a pool."""

    def __init__(self, *, answers_at_once=True, **options):
        self.pool = Pool(answers_at_once)
        super().__init__(pool=self.pool, **options)
        self.tokens = {}
        self.now = 0.0

    def wait(self, seconds):
        """Let time pass before the next step."""
        self.now += seconds
        self.scheduler.expire(self.now)

    def add(self, name, prompt, **options):
        request = super().add(name, prompt, **options)
        self.tokens[name] = request
        return request

    def save_all(self):
        for save_id in list(self.pool.saves):
            self.scheduler.handle_pool_event(ChunksCopied(save_id))

    def answer(self, load_id):
        keys = self.pool.asked.pop(load_id)
        self.scheduler.handle_pool_event(ChunksFound(load_id, self.pool.find(keys)))

    def bring(self, load):
        """Write the chunks' KV to the load's blocks."""
        prompt = self.tokens[load.request_id].token_ids[: len(load.keys) * CHUNK]
        start = load.first_chunk * CHUNK + load.skipped_tokens
        self.worker.load(load.block_ids, prompt, start)

    def release(self, load_id):
        load = self.pool.loads[load_id]
        self.bring(load)
        self.scheduler.handle_pool_event(LoadReleased(load_id, len(load.keys)))

    def end(self, load_id, error=None):
        load = self.pool.loads.pop(load_id)
        if error is None:
            self.bring(load)
        num_right = load.first_chunk if error else len(load.keys)
        self.scheduler.handle_pool_event(PoolLoadEnded(load_id, num_right, error))
        self.scheduler.check_integrity()


def prompt_of(length, seed=0):
    return [random.Random(f"{seed}/{i // 3}").randrange(3, 40) for i in range(length)]


def filled(bench, prompt, name="first"):
    """Save a prompt's chunks to the pool, and clear the device's prefix cache."""
    bench.add(name, prompt, max_tokens=2)
    bench.run()
    bench.save_all()
    assert bench.scheduler.reset_prefix_cache()
    bench.worker.num_computed = 0


def the_load(bench):
    (load_id,) = bench.pool.loads
    return load_id


def test_second_turn_loads_the_chunks_of_the_first():
    bench = PoolBench(token=None)
    prompt = prompt_of(19)
    request = bench.add("first", prompt, max_tokens=8)
    bench.run()
    bench.save_all()
    turn = [*request.token_ids, *prompt_of(5, seed=9)]
    bench.scheduler.reset_prefix_cache()
    bench.worker.num_computed = 0
    second = bench.add("second", turn, max_tokens=3)
    bench.step()
    load_id = the_load(bench)
    assert second.status is RequestStatus.TRANSFERRING
    bench.end(load_id)
    answers = bench.run()
    num_loaded = (len(turn) - 1) // CHUNK * CHUNK
    assert second.num_cached_tokens == num_loaded >= 24
    assert bench.worker.num_computed == len(turn) - num_loaded + 2
    assert answers["second"] == [token_of("second", i) for i in range(3)]


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_last_token_of_a_prompt_is_never_loaded(length):
    bench = PoolBench()
    prompt = prompt_of(length)
    filled(bench, prompt)
    bench.add("again", prompt)
    bench.step()
    loaded = [len(load.keys) for load in bench.pool.loads.values()]
    assert loaded == [(length - 1) // CHUNK] * (length > CHUNK)


def test_chunks_cached_on_the_device_are_not_loaded():
    bench = PoolBench(block_size=4)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("on device", prompt[:12] + prompt_of(3, seed=5), max_tokens=1)
    bench.step()
    bench.end(the_load(bench), "lost")
    bench.run()
    bench.add("again", prompt)
    bench.step()
    (load,) = bench.pool.loads.values()
    assert (load.first_chunk, load.skipped_tokens, len(load.keys)) == (1, 4, 3)
    before = bench.scheduler.prompt_tokens_by_source
    bench.end(load.load_id)
    bench.run()
    found = bench.scheduler.prompt_tokens_by_source
    new = {name: found[name] - before[name] for name in found if found[name] != before[name]}
    assert new == {"local_cache_hit": 12, "host": 12, "local_compute": 6}


def test_failed_load_is_recomputed():
    bench = PoolBench()
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("again", prompt, max_tokens=2)
    bench.step()
    bench.end(the_load(bench), "the store is gone")
    assert len(bench.run()["again"]) == 2
    assert bench.worker.num_computed == 31
    assert bench.pool.loads == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_on_an_unfinished_load_publish_no_tokens(depth):
    bench = PoolBench(depth=depth, uses_async_scheduling=depth > 1)
    prompt = prompt_of(30)
    filled(bench, prompt)
    request = bench.add("again", prompt, max_tokens=3)
    bench.step()
    load_id = the_load(bench)
    bench.release(load_id)
    for _ in range(4):
        assert bench.step()[1] == []
    assert request.is_unproven
    bench.end(load_id)
    assert len(bench.run()["again"]) == 3
    assert bench.worker.num_computed == 30 - 24 + 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_steps_on_a_failed_load_are_repeated(depth, num_steps):
    bench = PoolBench(depth=depth, uses_async_scheduling=depth > 1)
    prompt = prompt_of(30)
    filled(bench, prompt)
    request = bench.add("again", prompt, max_tokens=3)
    bench.step()
    load_id = the_load(bench)
    bench.release(load_id)
    for _ in range(num_steps):
        assert bench.step()[1] == []
    bench.end(load_id, "it was taken back")
    assert len(bench.run()["again"]) == 3
    assert not request.has_wrong_kv
    assert request.num_cached_tokens == 0
    assert bench.num_free == bench.scheduler.blocks.pool.num_blocks


@pytest.mark.parametrize("sends_kv", [False, True])
def test_sender_aborted_during_its_load_is_withdrawn(sends_kv):
    bench = PoolBench(num_blocks=32)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("again", prompt, sends_kv=sends_kv)
    bench.step()
    load_id = the_load(bench)
    bench.scheduler.abort("again")
    assert bench.connector.withdrawn == ["again"] * sends_kv
    bench.end(load_id, "cancelled")
    assert bench.num_free == bench.scheduler.blocks.pool.num_blocks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_blocks_of_an_aborted_request_are_kept_until_its_load_drains(depth, is_released, num_steps):
    bench = PoolBench(depth=depth, uses_async_scheduling=depth > 1)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("again", prompt)
    bench.step()
    load_id = the_load(bench)
    if is_released:
        bench.release(load_id)
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.abort("again")
    while bench.in_flight:
        bench.land()
    bench.scheduler.check_integrity()
    assert bench.pool.cancelled == {load_id}
    assert not bench.pool.late
    assert bench.num_free < bench.scheduler.blocks.pool.num_blocks
    bench.end(load_id, "cancelled")
    bench.run()
    assert bench.num_free == bench.scheduler.blocks.pool.num_blocks


def test_lookup_times_out():
    bench = PoolBench(answers_at_once=False)
    prompt = prompt_of(30)
    bench.add("slow", prompt, max_tokens=1)
    assert bench.step()[0].is_empty
    bench.scheduler.expire(100.0)
    assert bench.run() == {"slow": [7]}
    bench.answer(next(iter(bench.pool.asked)))


def test_one_load_serves_all_requests_with_the_prompt():
    bench = PoolBench(num_blocks=32)
    prompt = prompt_of(30)
    filled(bench, prompt)
    for name in ("a", "b", "c"):
        bench.add(name, prompt, max_tokens=1)
        bench.step()
    load_id = the_load(bench)
    assert bench.pool.stats.num_waits == 2
    bench.end(load_id)
    assert set(bench.run()) == {"a", "b", "c"}
    assert bench.pool.loads == {}
    assert bench.worker.num_computed <= 3 * 6


def test_request_waiting_for_a_failed_load_looks_up_again():
    bench = PoolBench(num_blocks=32)
    prompt = prompt_of(30)
    filled(bench, prompt)
    for name in ("a", "b"):
        bench.add(name, prompt, max_tokens=1)
        bench.step()
    bench.end(the_load(bench), "lost")
    for _ in range(20):
        bench.step()
        for load_id in list(bench.pool.loads):
            bench.end(load_id)
    assert not bench.scheduler.has_work


def test_siblings_share_one_load():
    bench = PoolBench(num_blocks=32)
    prompt = prompt_of(30)
    filled(bench, prompt)
    for index in range(3):
        bench.add(f"n{index}", prompt, max_tokens=2, group="n")
    bench.step()
    (load,) = bench.pool.loads.values()
    assert load.release_layers is None
    bench.end(load.load_id)
    assert len(bench.run()) == 3


def test_load_is_cancelled_at_its_timeout():
    bench = PoolBench()
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("again", prompt, max_tokens=1)
    bench.step()
    load_id = the_load(bench)
    bench.scheduler.expire(100.0)
    assert bench.pool.cancelled == bench.pool.late == {load_id}
    assert len(bench.run()["again"]) == 1
    assert bench.num_free < bench.scheduler.blocks.pool.num_blocks
    bench.end(load_id, "cancelled")
    assert bench.num_free == bench.scheduler.blocks.pool.num_blocks


def test_save_from_reallocated_blocks_is_dropped():
    bench = PoolBench(num_blocks=8, prefix_caching=False)
    bench.add("first", prompt_of(16), max_tokens=1)
    bench.run()
    bench.add("second", prompt_of(30, seed=4), max_tokens=1)
    bench.run()
    first, second = bench.pool.saves
    bench.scheduler.handle_pool_event(ChunksCopied(first))
    assert bench.pool.stored == set()
    bench.scheduler.handle_pool_event(ChunksCopied(second))
    assert len(bench.pool.stored) == 3


def test_preempted_request_offers_chunks_again_whose_save_was_dropped():
    """All chunks that it computes later would be of no use without them."""
    bench = PoolBench(num_blocks=14, block_size=4, token=None, prefix_caching=False)
    bench.add("first", prompt_of(20), max_tokens=22, arrival=1.0)
    lost = bench.add("second", prompt_of(8, seed=3), max_tokens=22, arrival=2.0)
    while not (lost.num_preemptions and lost.num_computed):
        bench.step()
    bench.save_all()  # its blocks are other requests' by now
    while bench.scheduler.has_work:
        bench.step()
        bench.save_all()
    num_chunks = (lost.num_tokens - 1) // CHUNK
    assert num_chunks == 3
    assert bench.pool.stored.issuperset(bench.pool.keys(lost, num_chunks))


def test_rejected_chunks_are_offered_again_with_the_next_chunk():
    """A gap would make all later chunks useless."""
    bench = PoolBench(num_blocks=32)
    bench.pool.refuses = True
    bench.add("long", prompt_of(2 * CHUNK + 1), max_tokens=4 * CHUNK)
    offered = bench.pool.refused
    while len(offered) < 2:
        bench.step()
    assert [(len(save.keys), save.first_chunk, save.num_refused) for save in offered] == [
        (2, 0, 0),
        (3, 0, 2),
    ]
    bench.pool.refuses = False
    bench.run()
    taken = list(bench.pool.saves.values())
    assert [(save.first_chunk, len(save.keys), save.num_refused) for save in taken[:2]] == [
        (0, 4, 3),
        (4, 5, 0),
    ]
    bench.save_all()
    assert len(bench.pool.stored) == len(taken[-1].keys)


def ended_with_refused_chunks(**options):
    """Return a bench whose pool rejected a finished request's chunks while saving another's."""
    bench = PoolBench(num_blocks=32, **options)
    bench.add("other", prompt_of(CHUNK + 1, seed=9), max_tokens=2)
    bench.step()
    bench.pool.refuses = True
    bench.add("short", prompt_of(2 * CHUNK + 1), max_tokens=2)
    bench.run()
    first, *later = [(len(save.keys), save.num_refused) for save in bench.pool.refused]
    assert first == (2, 0)
    assert set(later) <= {(2, 2)}, "each chunk is counted once"
    bench.pool.refuses = False
    return bench


def test_rejected_chunks_of_a_finished_request_are_offered_after_a_save():
    bench = ended_with_refused_chunks()
    assert bench.scheduler.blocks.pool.num_free == 32, "no blocks are held for the retry"
    bench.save_all()
    [again] = bench.pool.saves.values()
    assert (len(again.keys), again.first_chunk, again.num_refused, again.step) == (2, 0, 2, None)
    bench.save_all()
    assert bench.pool.stored.issuperset(again.keys)
    bench.save_all()
    assert not bench.pool.saves


def test_rejected_chunks_are_dropped_with_their_blocks():
    bench = ended_with_refused_chunks()
    pool = bench.scheduler.blocks.pool
    pool.release(pool.allocate(32))
    bench.save_all()
    assert not bench.pool.saves


def test_rejected_chunks_that_were_never_computed_are_dropped():
    """Their step was planned, and the request was aborted before the step completed."""
    bench = PoolBench(num_blocks=32)
    bench.add("other", prompt_of(CHUNK + 1, seed=9), max_tokens=1)
    bench.run()
    [other] = bench.pool.saves
    bench.pool.refuses = True
    bench.add("short", prompt_of(2 * CHUNK + 1), max_tokens=2)
    bench.submit()
    assert len(bench.pool.refused) == 1
    bench.scheduler.abort("short")
    bench.pool.refuses = False
    bench.scheduler.handle_pool_event(ChunksCopied(other))
    assert not bench.pool.saves
    bench.land()


def test_requests_with_rejected_chunks_are_bounded(monkeypatch):
    monkeypatch.setattr(pool_saves, "MAX_REJECTED", 3)
    bench = PoolBench(num_blocks=64)
    bench.pool.refuses = True
    for number in range(6):
        bench.add(f"r{number}", prompt_of(CHUNK + 1, seed=number), max_tokens=1)
        bench.run()
    bench.pool.refuses = False
    bench.wait(pool_saves.MIN_RETRY_S)
    bench.add("next", prompt_of(CHUNK - 1, seed=50), max_tokens=1)
    bench.run()
    assert len(bench.pool.saves) == 3


def refused_by_full_store(bench, name, seed, first=0):
    """Return the save of a finished request of two chunks; the store had no memory for those from
    ``first`` on."""
    bench.add(name, prompt_of(2 * CHUNK + 1, seed=seed), max_tokens=1)
    bench.run()
    save_id, save = list(bench.pool.saves.items())[-1]
    refuse(bench, save_id, first)
    return save


def refuse(bench, save_id, first=0):
    """Have a store without memory answer a save, of which it stores the chunks before ``first``."""
    bench.scheduler.handle_pool_event(ChunksCopied(save_id, first > 0, first))
    bench.pool.saves.pop(save_id, None)


def step_after(bench, seconds):
    """Run a step of another request that completes no chunk, this much later."""
    bench.wait(seconds)
    bench.add(f"later{bench.now}", prompt_of(3, seed=99), max_tokens=1)
    bench.run()


def test_chunks_without_memory_are_offered_again_while_their_blocks_are_cached():
    bench = PoolBench(num_blocks=64)
    save = refused_by_full_store(bench, "short", seed=1, first=1)
    assert not bench.pool.saves, "a full store is not asked again at once"
    assert bench.scheduler.blocks.pool.num_free == 64, "no blocks are held for the retry"
    step_after(bench, pool_saves.MIN_RETRY_S)
    [again] = bench.pool.saves.values()
    assert (again.first_chunk, again.num_refused, again.step) == (1, 1, None)
    assert (again.keys, again.block_ids) == (save.keys, save.block_ids)
    bench.save_all()
    assert bench.pool.stored == set(save.keys)


def test_idle_instance_offers_chunks_without_memory_again():
    bench = PoolBench(num_blocks=64)
    save = refused_by_full_store(bench, "short", seed=1)
    bench.wait(pool_saves.MIN_RETRY_S)
    assert bench.scheduler.schedule().is_empty
    bench.save_all()
    assert bench.pool.stored == set(save.keys)


def test_idle_instance_offers_rejected_chunks_again():
    bench = PoolBench(num_blocks=64)
    bench.pool.refuses = True
    bench.add("short", prompt_of(2 * CHUNK + 1), max_tokens=1)
    bench.run()
    bench.pool.refuses = False
    bench.wait(pool_saves.MIN_RETRY_S)
    assert bench.scheduler.schedule().is_empty
    assert [len(save.keys) for save in bench.pool.saves.values()] == [2]


def test_a_pool_that_rejects_saves_is_not_asked_in_every_step(monkeypatch):
    bench = ended_with_refused_chunks()
    pool, num_looks = bench.scheduler.blocks.pool, []
    uses = pool.uses
    monkeypatch.setattr(pool, "uses", lambda blocks: num_looks.append(len(blocks)) or uses(blocks))
    bench.pool.refuses = True
    for _ in range(12):
        step_after(bench, pool_saves.MIN_RETRY_S / 4)
    assert len(num_looks) == 3
    bench.pool.refuses = False
    bench.save_all()  # it takes another save now
    assert [len(save.keys) for save in bench.pool.saves.values()] == [2]


def test_a_full_store_is_asked_for_one_save_at_a_time_and_ever_less_often():
    bench = PoolBench(num_blocks=256)
    for seed in range(4):
        refused_by_full_store(bench, f"r{seed}", seed)
    num_retries, began = 0, bench.now
    while bench.now < began + 10 * pool_saves.MAX_RETRY_S:
        step_after(bench, pool_saves.MIN_RETRY_S / 2)
        assert len(bench.pool.saves) <= 1
        for save_id in list(bench.pool.saves):
            num_retries += 1
            refuse(bench, save_id)
    assert 10 < num_retries < 20
    step_after(bench, pool_saves.MAX_RETRY_S)
    for _ in range(4):  # the store has memory again: each save follows the one before it
        assert len(bench.pool.saves) == 1
        bench.save_all()
    assert len(bench.pool.stored) == 8
    assert not bench.pool.saves


def test_chunks_without_memory_are_dropped_with_their_blocks():
    bench = PoolBench(num_blocks=64)
    refused_by_full_store(bench, "short", seed=1)
    pool = bench.scheduler.blocks.pool
    pool.release(pool.allocate(64))
    assert bench.tokens["short"].num_saved == 2 * CHUNK
    step_after(bench, pool_saves.MIN_RETRY_S)
    assert not bench.pool.saves
    assert bench.tokens["short"].num_saved == 0, "a preempted request would offer them again"


def test_chunks_refused_before_their_step_ends_are_offered_once_they_are_computed():
    bench = PoolBench(num_blocks=64)
    bench.add("short", prompt_of(2 * CHUNK + 1), max_tokens=3)
    bench.submit()
    [save] = bench.pool.saves
    bench.wait(1)
    refuse(bench, save)
    assert not bench.pool.saves
    bench.land()
    bench.wait(1)
    bench.run()
    [again] = bench.pool.saves.values()
    assert (again.first_chunk, len(again.keys)) == (0, 2)


def test_saves_without_memory_are_bounded():
    bench = PoolBench(num_blocks=1024)
    for seed in range(pool_saves.MAX_REJECTED + 6):
        refused_by_full_store(bench, f"r{seed}", seed)
    step_after(bench, pool_saves.MAX_RETRY_S)
    num_stored = 0
    while bench.pool.saves:
        num_stored += 1
        bench.save_all()
    assert num_stored == pool_saves.MAX_REJECTED


def test_copied_chunks_are_found_while_later_ones_are_saved():
    """Chunks of another store are saved here in parts: the first are available before the last."""
    bench = PoolBench(num_blocks=64, block_size=4)
    filled(bench, prompt_of(11 * CHUNK + 1))
    far = ChunkSource(1, Tier.DRAM)
    bench.pool.find = lambda keys: [HOME] + [far] * (len(keys) - 1)
    bench.add("again", prompt_of(11 * CHUNK + 1), max_tokens=1)
    bench.step()
    bench.end(the_load(bench))
    copies = [save for save in bench.pool.saves.values() if save.copy is not None]
    assert [(save.first_chunk, len(save.keys)) for save in copies] == [(1, 5), (5, 9), (9, 11)]
    assert all(len(save.block_ids) * 4 == len(save.keys) * CHUNK for save in copies)
    bench.save_all()
    bench.run()


def test_no_request_is_preempted_while_a_step_depends_on_its_load():
    bench = PoolBench(num_blocks=14, block_size=4)
    prompt = prompt_of(26)
    filled(bench, prompt)
    bench.add("other", prompt_of(12, seed=3), max_tokens=20)
    bench.step()
    bench.add("again", prompt, max_tokens=3)
    bench.step()
    load_id = the_load(bench)
    bench.release(load_id)
    for _ in range(25):
        bench.step()
    bench.end(load_id, "lost")
    assert len(bench.run()["again"]) == 3


@pytest.mark.parametrize("is_right", [True, False])
def test_late_sibling_does_not_share_the_prompt_before_its_load_completes(is_right):
    """Choices arrive one by one: steps may already depend on the first one's load."""
    bench = PoolBench(num_blocks=32, token=None, eos_token_ids=frozenset())
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("n0", prompt, max_tokens=6, group="n")
    bench.step()
    load_id = the_load(bench)
    late = bench.add("n1", prompt, max_tokens=6, group="n")
    if is_right:
        bench.release(load_id)
    else:
        bench.worker.load(bench.pool.loads[load_id].block_ids, prompt_of(30, seed=8)[:24], 0)
        bench.worker.check = lambda *_: None  # steps run before the load completes
        bench.scheduler.handle_pool_event(LoadReleased(load_id, 3))
    for _ in range(3):
        assert bench.step()[1] == []
    assert late.num_output_tokens == 0
    vars(bench.worker).pop("check", None)
    bench.end(load_id, None if is_right else "the store took its chunks back")
    answers = bench.run()
    assert {name: len(tokens) for name, tokens in answers.items()} == {"n0": 6, "n1": 6}


def test_choices_save_their_prompt_once():
    for depth in (1, 2):
        bench = PoolBench(num_blocks=64, depth=depth, uses_async_scheduling=depth > 1)
        for index in range(4):
            bench.add(f"n{index}", prompt_of(30), max_tokens=4, group="n")
        bench.run()
        saves = list(bench.pool.saves.values())
        assert [(s.first_chunk, len(s.keys)) for s in saves].count((0, 3)) == 1
        assert all(save.first_chunk == 3 for save in saves[1:])


def test_sibling_saves_the_chunks_of_its_own_answer():
    """The sequence that it is forked from has saved chunks of another answer."""
    bench = PoolBench(num_blocks=64, token=None, eos_token_ids=frozenset())
    prompt = prompt_of(2 * CHUNK)
    bench.add("n0", prompt, max_tokens=4 * CHUNK, group="n")
    for _ in range(3 * CHUNK):
        bench.step()
    late = bench.add("n1", prompt, max_tokens=2 * CHUNK, group="n")
    bench.run()
    saved = {key: save.first_chunk for save in bench.pool.saves.values() for key in save.keys[-1:]}
    assert saved[bench.pool.keys(late, 3)[-1]] == 2


def test_choice_whose_pull_failed_shares_the_prompt_that_its_sibling_pulls():
    """The connector has given up its own load: a second one would never end."""
    bench = PoolBench(num_blocks=64, token=None)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.pool.answers_at_once = False
    failed = bench.add("n0", prompt, max_tokens=4, group="n", pulls_kv=True)
    other = bench.add("n1", prompt, max_tokens=4, group="n", pulls_kv=True)
    bench.step()
    bench.end_load("n0", "the peer is dead")
    bench.step()
    bench.answer(next(iter(bench.pool.asked)))
    bench.step()
    assert failed.leader is other
    bench.end_load("n1", None)
    assert not bench.connector.loading
    assert set(bench.run()) == {"n0", "n1"}


def test_choice_pulls_by_itself_after_its_siblings_pull_failed():
    """The sibling now loads from the pool, which is not a load of the peer's KV."""
    bench = PoolBench(num_blocks=64, token=None)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("n0", prompt, max_tokens=40, group="n", first_token=9)
    other = bench.add("n1", prompt, max_tokens=40, group="n", first_token=9)
    bench.step()
    bench.end_load("n0", "the peer is dead")
    bench.step()
    bench.end(the_load(bench))
    assert other.leader is None
    assert "n1" in bench.connector.loading


def test_retry_does_not_wait_for_the_load_of_an_aborted_request():
    bench = PoolBench(num_blocks=64)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("left", prompt)
    bench.step()
    left = the_load(bench)
    bench.scheduler.abort("left")
    retry = bench.add("retry", prompt, max_tokens=1)
    bench.step()
    assert retry.status is RequestStatus.TRANSFERRING
    bench.end(retry.pool_load)
    bench.end(left, "cancelled")
    assert bench.pool.stats.num_waits == 0
    assert len(bench.run()["retry"]) == 1


def looked_at(bench):
    """Runs a step and returns which waiting requests it looked at for loads to start early."""
    waiting, seen = bench.scheduler._queues.waiting, []

    def in_order():
        for request in type(waiting).in_order(waiting):
            seen.append(request.request_id)
            yield request

    waiting.in_order = in_order
    bench.step()
    del waiting.in_order
    return seen


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_queue_is_not_searched_for_the_hit_of_a_request_that_has_ended(timeout_s):
    bench = PoolBench(num_blocks=64, max_num_seqs=1)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("runs", [10], max_tokens=100)
    bench.step()
    for index in range(20):  # they would get all free blocks before it
        bench.add(f"w{index}", prompt_of(12, seed=index), arrival=1.0 + index)
    bench.add("left", prompt, arrival=99.0, timeout_s=timeout_s)
    assert len(looked_at(bench)) > 10
    if timeout_s is None:
        bench.scheduler.abort("left")
    else:
        bench.wait(200.0)
    assert looked_at(bench) == []


def test_queue_is_not_searched_behind_the_last_hit():
    bench = PoolBench(num_blocks=64, max_num_seqs=1)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("runs", [10], max_tokens=100)
    bench.step()
    bench.add("before", prompt_of(5, seed=1), arrival=1.0)
    loads = bench.add("loads", prompt, arrival=2.0)
    for index in range(5):
        bench.add(f"w{index}", prompt_of(5, seed=index), arrival=3.0 + index)
    assert looked_at(bench) == ["before", "loads"]
    assert loads.status is RequestStatus.TRANSFERRING
    assert looked_at(bench) == []


def test_queue_is_not_searched_for_the_hit_of_a_choice_that_follows_another():
    """The pool got the prompt's chunks between the lookups of the two."""
    bench = PoolBench(num_blocks=64)
    prompt = prompt_of(30)
    bench.add("n0", prompt, group="n")
    bench.pool.stored.update(bench.pool.keys(bench.tokens["n0"], 3))
    follows = bench.add("n1", prompt, group="n")
    assert bench.scheduler._pool.loads.has_hit(follows)
    bench.submit()
    assert follows.status is RequestStatus.RUNNING
    bench.land()
    assert looked_at(bench) == []
    assert not bench.scheduler._pool.loads.has_hit(follows)
    bench.run()


def test_request_starts_its_own_load_after_waiting_for_another():
    bench = PoolBench(num_blocks=64)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("slow", prompt, max_tokens=1)
    bench.step()
    slow = the_load(bench)
    bench.release(slow)
    waits = bench.add("waits", prompt, max_tokens=1)
    bench.step()
    assert waits.status is RequestStatus.LOOKING_UP
    bench.scheduler.expire(100.0)
    bench.step()
    assert waits.status is RequestStatus.TRANSFERRING
    bench.end(waits.pool_load)
    bench.end(slow)
    bench.run()


def test_decodes_continue_while_a_released_load_holds_blocks():
    """Without the load, the batch request would be preempted for a prompt."""
    bench = PoolBench(num_blocks=30, block_size=4)
    prompt = prompt_of(26)
    filled(bench, prompt)
    bench.add("batch", prompt, max_tokens=20, priority=BATCH_PRIORITY)
    bench.step()
    load_id = the_load(bench)
    bench.release(load_id)
    bench.step()
    for index in range(3):
        bench.add(f"d{index}", prompt_of(9, seed=20 + index), max_tokens=20)
    bench.step()
    bench.add("waits", prompt_of(60, seed=11), max_tokens=2, arrival=1.0)
    for _ in range(8):
        plan, _ = bench.step()
        assert len(plan.sequences) >= 3
    bench.end(load_id)
    bench.run()


def test_decode_waits_for_a_lower_priority_load_without_preemption():
    """The load holds the block that the decode needs, which waits until the load has completed."""
    bench = PoolBench(num_blocks=12, block_size=4)
    prompt = prompt_of(26)
    filled(bench, prompt)
    decode = bench.add("decodes", prompt_of(17, seed=5), max_tokens=20, arrival=0.0)
    bench.step()
    loads = bench.add("loads", prompt, max_tokens=3, arrival=1.0)
    bench.step()
    load_id = the_load(bench)
    bench.release(load_id)
    for _ in range(12):
        bench.step()
    assert decode.status is RequestStatus.RUNNING
    assert bench.num_free == 0
    bench.end(load_id)
    bench.run()
    assert (decode.num_preemptions, loads.num_preemptions) == (0, 1)


def test_no_batch_load_starts_while_an_interactive_load_waits_for_blocks():
    """Batch loads cancelled for it would take the blocks again, endlessly."""
    bench = PoolBench(num_blocks=30, block_size=4)
    for index in range(3):
        filled(bench, prompt_of(30, seed=index), f"first{index}")
    for index in range(3):
        bench.add(f"b{index}", prompt_of(30, seed=index), max_tokens=3, priority=BATCH_PRIORITY)
    bench.step()
    assert len(bench.pool.loads) == 3
    waits = bench.add("waits", prompt_of(60, seed=50), max_tokens=2, pulls_kv=True)
    num_given_up = 0
    while waits.status is RequestStatus.PREALLOCATING:
        for load_id in list(bench.pool.loads):
            if load_id in bench.pool.cancelled:
                num_given_up += 1
                bench.end(load_id, "cancelled")
        assert num_given_up <= 3
        bench.step()
    bench.end_load("waits", None)
    for _ in range(60):
        for load_id in list(bench.pool.loads):
            bench.end(load_id)
        bench.step()
    assert not bench.scheduler.has_work


def test_batch_loads_are_cancelled_for_an_interactive_prompt():
    bench = PoolBench(num_blocks=30, block_size=4)
    for index in range(3):
        filled(bench, prompt_of(30, seed=index), f"first{index}")
    for index in range(3):
        bench.add(f"b{index}", prompt_of(30, seed=index), max_tokens=3, priority=BATCH_PRIORITY)
    bench.step()
    assert len(bench.pool.loads) == 3
    waits = bench.add("waits", prompt_of(30, seed=50), max_tokens=2)
    bench.step()
    bench.step()
    [load_id] = bench.pool.cancelled  # only as many as the prompt needs
    bench.end(load_id, "cancelled")
    bench.step()
    assert waits.status is RequestStatus.RUNNING
    for _ in range(30):
        for load_id in list(bench.pool.loads):
            bench.end(load_id)
        bench.step()
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("is_wrong", [False, True])
def test_end_of_a_cancelled_load_does_not_verify_the_next_one(is_wrong):
    bench = PoolBench(num_blocks=16, block_size=4)
    prompt = prompt_of(30)
    filled(bench, prompt)
    batch = bench.add("batch", prompt, max_tokens=3, priority=BATCH_PRIORITY)
    bench.step()
    given_up = the_load(bench)
    bench.add("waits", prompt_of(38, seed=5), max_tokens=1)
    bench.step()
    assert bench.pool.cancelled == {given_up}
    assert not bench.pool.late
    bench.scheduler.abort("waits")
    bench.step()
    bench.release(batch.pool_load)
    bench.step()
    bench.end(given_up, "cancelled")
    assert batch.is_unproven
    assert bench.step()[1] == []
    bench.end(batch.pool_load, "lost" if is_wrong else None)
    assert len(bench.run()["batch"]) == 3


def test_preempted_request_loads_its_answer_as_well():
    """A long answer lost its blocks to preemption: the pool has the chunks computed so far."""
    bench = PoolBench(num_blocks=14, block_size=4, token=None, prefix_caching=False)
    bench.add("first", prompt_of(20), max_tokens=22, arrival=1.0)
    lost = bench.add("second", prompt_of(8, seed=3), max_tokens=22, arrival=2.0)
    num_tokens = []
    answers = {"first": [], "second": []}
    for _ in range(200):
        for update in bench.step()[1]:
            answers[update.request_id] += update.token_ids
        bench.save_all()
        for load_id, load in list(bench.pool.loads.items()):
            num_tokens.append(len(load.keys) * CHUNK)
            assert load.request_id == "second"
            bench.end(load_id)
    assert lost.num_preemptions > 0
    assert max(num_tokens, default=0) > lost.num_prompt_tokens
    assert answers["second"] == [token_of("second", i) for i in range(len(answers["second"]))]
    assert lost.num_cached_tokens == 0
    assert (lost.times.load_started_at, lost.times.loaded_at) == (None, None), "started without"
    assert not bench.scheduler.has_work


def test_what_a_prompt_saved_before_its_preemption_is_not_reported_as_cached():
    bench = PoolBench(
        num_blocks=12, max_num_batched_tokens=9, prefix_caching=False, eos_token_ids=frozenset()
    )
    bench.add("old", prompt_of(6), max_tokens=30)
    bench.step()
    lost = bench.add("new", prompt_of(38, seed=3), max_tokens=2, arrival=1.0)
    num_loads = 0
    while bench.scheduler.has_work:
        bench.step()
        bench.save_all()
        for load_id in list(bench.pool.loads):
            num_loads += 1
            bench.end(load_id)
    assert lost.num_preemptions > 0
    assert num_loads > 0
    assert lost.num_cached_tokens == 0


def test_later_choice_does_not_share_a_preempted_choices_load():
    """That load has the whole prompt and part of the answer: it is shared only once completed."""
    bench = PoolBench(num_blocks=14, block_size=4, token=None, prefix_caching=False)
    bench.add("first", prompt_of(20), max_tokens=22, arrival=1.0)
    prompt = prompt_of(8, seed=3)
    lost = bench.add("second", prompt, max_tokens=22, arrival=2.0, group="second")
    while not bench.pool.loads:
        bench.step()
        bench.save_all()
    load_id = the_load(bench)
    bench.scheduler.abort("first")
    bench.release(load_id)
    assert lost.num_computed > lost.num_prompt_tokens
    late = bench.add("late", prompt, max_tokens=2, arrival=3.0, group="second")
    bench.step()
    assert set(late.block_ids).isdisjoint(lost.block_ids)
    bench.end(load_id, "lost")
    bench.run()


@pytest.mark.parametrize("first_token", [None, 9])
def test_prompt_is_loaded_from_the_pool_after_its_peer_failed(first_token):
    bench = PoolBench(token=None)
    prompt = prompt_of(30)
    filled(bench, prompt)
    options = {"pulls_kv": True} if first_token is None else {"first_token": first_token}
    request = bench.add("pulls", prompt, max_tokens=3, **options)
    bench.step()
    assert request.request_id in bench.connector.loading
    bench.end_load("pulls", "the peer is dead")
    bench.step()
    load_id = the_load(bench)
    # a duplicate event, of a load that has ended
    bench.scheduler.handle_load_ended("pulls", "the peer is dead")
    assert request.status is RequestStatus.TRANSFERRING
    bench.end(load_id)
    bench.run()
    assert bench.worker.num_computed < len(prompt)


def test_prefix_evicted_while_a_request_waits_is_loaded():
    """A prompt that waits behind others loads the blocks that they have evicted meanwhile."""
    bench = PoolBench(num_blocks=16, block_size=4)
    prompt = prompt_of(30)
    filled(bench, prompt)
    bench.add("caches", prompt, max_tokens=1)
    bench.step()
    bench.end(the_load(bench))
    bench.run()
    bench.add("large", prompt_of(56, seed=4), max_tokens=1, arrival=1.0)
    bench.add("waits", prompt, max_tokens=1, arrival=2.0)
    for _ in range(10):
        bench.step()
        for load_id in list(bench.pool.loads):
            assert bench.pool.loads[load_id].request_id == "waits"
            bench.end(load_id)
            return
    raise AssertionError("the prompt was computed")


class RandomRun:
    """Requests that arrive, finish, load and save in random order. Some have KV from peers, some
    are batch work, and some runs have drafts.

    Args:
        seed: the seed of all random choices.
    """

    def __init__(self, seed):
        self.dice = dice = random.Random(seed)
        depth = dice.choice([1, 2])
        self.bench = PoolBench(
            num_blocks=dice.choice([16, 28]),
            num_host_blocks=dice.choice([0, 12]),
            token=None,
            depth=depth,
            uses_async_scheduling=depth > 1,
            answers_at_once=dice.random() < 0.5,
            max_num_batched_tokens=dice.choice([12, 64]),
            num_speculative_tokens=dice.choice([0, 2]),
        )
        self.bench.worker.num_accepted = dice.choice([0, 1])
        self.answers, self.live = {}, set()
        self.now, self.num_groups, self.num_siblings = 0.0, 0, 0

    def come_and_go(self):
        dice = self.dice
        if dice.random() < 0.25 and len(self.live) < 6:
            self.num_groups += 1
            size = dice.choice([1, 1, 1, 2])
            prompt = prompt_of(dice.randrange(4, 44), dice.choice([0, 1]))
            kind = dice.choice([{}, {}, {"priority": BATCH_PRIORITY}, {"pulls_kv": True}])
            for index in range(size):
                name, group = f"g{self.num_groups}-{index}", f"g{self.num_groups}"
                options = {"group": group if size > 1 else None, "arrival": self.now, **kind}
                self.bench.add(name, prompt, max_tokens=dice.randrange(1, 9), **options)
                self.live.add(name)
        if self.live and dice.random() < 0.1:
            self.add_sibling(dice.choice(sorted(self.live)))
        if self.live and dice.random() < 0.03:
            self.bench.scheduler.abort(dice.choice(sorted(self.live)))

    def add_sibling(self, name):
        """Add one more choice to a request, at any point of its progress."""
        first, group = self.bench.tokens[name], name.partition("-")[0]
        if first.spec.group is None or len(self.live) >= 6:
            return
        self.num_siblings += 1
        late = f"{group}-late{self.num_siblings}"
        options = {"group": group, "arrival": self.now, "pulls_kv": first.loads_kv}
        self.bench.add(late, first.spec.prompt_token_ids, max_tokens=4, **options)
        self.live.add(late)

    def move(self):
        bench, dice = self.bench, self.dice
        if dice.random() < 0.3:
            bench.save_all()
        for load_id in [load_id for load_id in bench.pool.asked if dice.random() < 0.4]:
            bench.answer(load_id)
        for load_id, load in list(bench.pool.loads.items()):
            draw, is_gone = dice.random(), load_id in bench.pool.cancelled
            is_awaited = bench.tokens[load.request_id].pool_load == load_id
            if draw < 0.15 and load.release_layers is not None and is_awaited and not is_gone:
                bench.release(load_id)
            elif 0.15 < draw < 0.35:
                bench.end(load_id, "lost" if is_gone or dice.random() < 0.3 else None)
        for name in [name for name in bench.connector.loading if dice.random() < 0.2]:
            bench.end_load(name, "lost" if dice.random() < 0.4 else None)

    def step(self):
        self.now += 0.01
        self.bench.scheduler.expire(self.now)
        for update in self.bench.step()[1]:
            self.answers.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish is not None:
                self.live.discard(update.request_id)

    def finish(self):
        bench = self.bench
        for _ in range(400):
            for load_id in list(bench.pool.asked):
                bench.answer(load_id)
            for load_id in list(bench.pool.loads):
                bench.end(load_id, "lost" if load_id in bench.pool.cancelled else None)
            for name in list(bench.connector.loading):
                bench.end_load(name, None)
            self.step()
            is_loading = bench.pool.loads or bench.connector.loading
            if not bench.scheduler.has_work and not is_loading:
                return


def test_idle_engine_waits_for_lookups_as_well():
    """The last step was long before the request arrived."""
    bench = PoolBench(token=None, answers_at_once=False)
    request = bench.add("first", prompt_of(20), arrival=1000.0)
    bench.scheduler.expire(1000.1)
    assert request.status is RequestStatus.LOOKING_UP
    bench.scheduler.expire(1000.0 + MIN_TIMEOUT_S + 0.1)
    assert request.status is RequestStatus.WAITING


def test_prefix_sources_beyond_the_device_cache_are_queried():
    bench = PoolBench(token=None)
    bench.add("first", prompt_of(20), max_tokens=1)
    bench.run()
    bench.pool.hints.clear()
    near, far = (PrefixSource("10.0.0.1", 7701, "epoch", length) for length in (15, 24))
    sources = (near, far)
    bench.add("second", [*prompt_of(20), *prompt_of(11, seed=4)], prefix_sources=sources)
    assert bench.pool.hints == [((far,), MAX_HINT_TIMEOUT_S)]


def test_lookup_timeout_of_prefix_sources_is_the_prefill_time():
    sources = (PrefixSource("10.0.0.1", 7701, "epoch", 24),)
    timeouts = []
    for step_s in (1e-3, 0.3, 30.0):
        bench = PoolBench(token=None)
        for _ in range(50):
            bench.scheduler._pool._prefill.learn(31, 31 * 15, step_s, 0.0)
        bench.add("asks", prompt_of(31), prefix_sources=sources)
        timeouts.append(bench.pool.hints[-1][1])
    assert timeouts[0] == MIN_HINT_TIMEOUT_S
    assert MIN_HINT_TIMEOUT_S < timeouts[1] < MAX_HINT_TIMEOUT_S
    assert timeouts[2] == MAX_HINT_TIMEOUT_S


@pytest.mark.parametrize("seed", range(24))
def test_random_event_orders_keep_tokens_and_blocks_right(seed):
    """For any order of loads and saves, tokens equal those without a pool, and all blocks are
    freed."""
    run = RandomRun(seed)
    for _ in range(300):
        run.come_and_go()
        run.move()
        run.step()
    run.finish()
    assert not run.live
    assert run.bench.num_free == run.bench.scheduler.blocks.pool.num_blocks
    for name, found in run.answers.items():
        assert found == [token_of(name, index) for index in range(len(found))]
