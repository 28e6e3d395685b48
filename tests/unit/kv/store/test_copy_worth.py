"""Copies of chunks of other stores: kept if they are worth more than the chunks that they evict."""

import pytest

from mooncake_kv.store.arena_allocator import GRANULE
from mooncake_kv.store.chunk_store import Chunk, CopyTerms, PutRefusal, Residence, WriteHandle
from mooncake_kv.store.chunk_table import ChunkTable, TableSettings
from mooncake_kv.store.copy_replay import RULES, replay_copies
from mooncake_kv.store.copy_worth import UseCounts, worth_of_copy
from mooncake_kv.store.eviction import TailFirstLRU

ANNA = 1
FAST = CopyTerms(1, 0.001, 1.0)
SLOW = CopyTerms(1, 0.9, 1.0)


def chunk(name, tenant=""):
    return Chunk(name.encode(), None, 0, GRANULE, 16, tenant)


def table_of(granules, **options):
    return ChunkTable(granules * GRANULE, TableSettings(TailFirstLRU, 5.0, **options))


def put(table, name, now=0.0, copy=None, tenant=""):
    (grant,) = table.reserve([chunk(name, tenant)], ANNA, 10, now, copy)
    if isinstance(grant, WriteHandle):
        assert table.commit([grant.handle_id], ANNA, now) == [True]
    return grant


def where(table, names):
    return "".join(
        "." if found is Residence.ABSENT else name
        for name, found in zip(names, table.probe([n.encode() for n in names]), strict=True)
    )


def test_uses_decay_with_age_and_few_are_counted():
    counts = UseCounts(half_life_s=10, max_keys=2)
    counts.note([b"a"], 0)
    counts.note([b"a"], 10)
    assert counts.uses(b"a", 10) == 1.5
    assert counts.uses(b"a", 30) == pytest.approx(0.375)
    for key in (b"b", b"c"):
        counts.note([key], 20)
    assert counts.uses(b"a", 20) == 0.0, "forgotten: two others were used since"
    assert counts.uses(b"c", 20) == 1.0


@pytest.mark.parametrize("wrong", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, float("nan"))])
def test_invalid_terms_are_rejected(wrong):
    with pytest.raises(ValueError, match="wanted 1 copy or more"):
        CopyTerms(*wrong)


def test_worth_of_a_copy_falls_with_number_of_copies():
    worths = [worth_of_copy(6.0, CopyTerms(count, 0.5, 1.0)) for count in (1, 2, 5)]
    assert worths == [1.5, 1.0, 0.5]


def test_copy_is_kept_while_there_is_free_space():
    table = table_of(2)
    assert isinstance(put(table, "a", copy=FAST), WriteHandle)
    assert where(table, "a") == "a"


def test_copy_that_is_cheap_to_refetch_evicts_nothing_however_often_it_is_used():
    table = table_of(1)
    put(table, "a")
    for _ in range(20):
        assert put(table, "b", copy=FAST) is PutRefusal.LOW_VALUE
    assert where(table, "ab") == "a."
    assert table.stats.num_refused_puts == {"low_value": 20}
    table.check_integrity()


def test_hot_copy_over_a_slow_link_is_kept_and_a_cold_one_is_not():
    table = table_of(1)
    put(table, "a")
    table.touch([b"a"], 0)
    assert put(table, "b", copy=SLOW) is PutRefusal.LOW_VALUE
    refusals = 1
    while put(table, "b", copy=SLOW) is PutRefusal.LOW_VALUE:
        refusals += 1
    assert refusals == 2
    assert where(table, "ab") == ".b"


def test_cold_copies_are_evicted_before_last_copies():
    table = table_of(3)
    put(table, "a", now=0)  # older than the copies
    put(table, "x", now=1, copy=FAST)
    put(table, "y", now=2, copy=FAST)
    put(table, "b", now=3)
    assert where(table, "axyb") == "a.yb"
    put(table, "c", now=4)
    assert where(table, "axybc") == "a..bc"
    assert table.stats.num_evicted == {"copy": 2}
    put(table, "d", now=5)
    assert where(table, "abcd") == ".bcd"
    table.check_integrity()


def test_copy_worth_more_than_the_oldest_chunk_is_kept():
    table = table_of(2)
    put(table, "a", now=0)
    put(table, "x", now=1, copy=SLOW)
    for _ in range(4):
        table.touch([b"x"], 1)
    put(table, "b", now=2)
    assert where(table, "axb") == ".xb"


def test_tenants_copies_count_against_its_quota():
    table = table_of(4, quotas={"t": GRANULE})
    put(table, "a", tenant="t")
    assert put(table, "b", copy=FAST, tenant="t") is PutRefusal.LOW_VALUE
    assert where(table, "ab") == "a."
    table.check_integrity()


def test_chunks_after_a_copy_that_is_not_kept_are_not_kept():
    table = table_of(2)
    put(table, "a")
    put(table, "b")
    chunks = [chunk("x"), Chunk(b"y", b"x", 1, GRANULE, 16)]
    assert table.reserve(chunks, ANNA, 1, 0, FAST) == [PutRefusal.LOW_VALUE] * 2


def test_in_a_replay_fast_links_leave_few_copies_and_slow_ones_many():
    hot = [Chunk(b"h%d" % i, None, i, 1, 512) for i in range(4)]
    requests, times = [], []
    for number in range(400):
        own = [Chunk(b"%d-%d" % (number, i), None, 4 + i, 1, 512) for i in range(3)]
        requests.append([*hot, *own])
        times.append(float(number))

    def run(rule, refetch_s):
        return replay_copies(requests, times, rule, num_stores=4, capacity=12, refetch_s=refetch_s)

    fast = {rule: run(rule, 0.001) for rule in RULES}
    slow = {rule: run(rule, 0.05) for rule in RULES}
    assert fast["worth"].total_s <= min(fast["always"].total_s, fast["never"].total_s) * 1.01
    assert slow["worth"].total_s <= slow["always"].total_s * 1.05
    assert slow["worth"].total_s < slow["never"].total_s
    assert slow["worth"].num_copies > 0
    assert fast["never"].num_copies == 0
    assert fast["worth"].num_chunks == 400 * 7
