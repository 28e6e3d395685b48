"""The chunks of an arena: states, handles, quarantine and quotas; and no read is ever wrong."""

import random
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_kv.store import victim_choice
from mooncake_kv.store.arena_allocator import GRANULE
from mooncake_kv.store.chunk_store import (
    Chunk,
    CopyTerms,
    PutRefusal,
    ReadHandle,
    Residence,
    StoreStats,
    WriteHandle,
)
from mooncake_kv.store.chunk_table import QUARANTINE_MARGIN_S, ChunkTable, TableSettings
from mooncake_kv.store.eviction import POLICIES, TailFirstLRU

QUARANTINE_S = 5.0
ANNA, BERT = 1, 2


def chunk(name, parent=None, granules=1, position=0, tenant=""):
    before = None if parent is None else parent.encode()
    return Chunk(name.encode(), before, position, granules * GRANULE, 16, tenant)


def table_of(granules, **options):
    return ChunkTable(granules * GRANULE, TableSettings(TailFirstLRU, QUARANTINE_S, **options))


def put(table, *chunks, now=0.0, user=ANNA):
    handles = table.reserve(chunks, user, 10, now)
    assert all(isinstance(handle, WriteHandle) for handle in handles)
    assert table.commit([handle.handle_id for handle in handles], user, now) == [True] * len(chunks)


def levels(table):
    stats = StoreStats()
    table.fill_levels(stats)
    return stats


def test_staged_chunk_is_not_readable_and_not_staged_twice():
    table = table_of(4)
    (handle,) = table.reserve([chunk("a")], ANNA, 10, 0)
    assert table.probe([b"a", b"b"]) == [Residence.STAGING, Residence.ABSENT]
    assert table.pin([b"a"], BERT, 10, 0) == [None]
    assert table.reserve([chunk("a")], BERT, 10, 0) == [PutRefusal.STAGING]
    assert table.commit([handle.handle_id], ANNA, 1) == [True]
    assert table.reserve([chunk("a")], BERT, 10, 0) == [PutRefusal.PRESENT]
    assert table.probe([b"a"]) == [Residence.DRAM]
    table.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_use", [True, False])
def test_reserve_without_use_does_not_protect_chunks(policy, is_use):
    table = ChunkTable(2 * GRANULE, TableSettings(POLICIES[policy], QUARANTINE_S))
    put(table, chunk("a"), now=0)
    put(table, chunk("b"), now=1)
    table.reserve([chunk("a")], BERT, 10, 2, is_use=is_use)
    put(table, chunk("c"), now=3)
    left = table.probe([b"a", b"b"])
    expected = [Residence.DRAM, Residence.ABSENT]
    assert left == (expected if is_use else expected[::-1])


def test_read_of_a_staged_chunk_is_valid_once_it_is_committed():
    table = table_of(4)
    (handle,) = table.reserve([chunk("a")], ANNA, 10, 0)
    early, late = table.pin([b"a", b"a"], BERT, 10, 0, are_arriving=True)
    assert table.release([early.handle_id], BERT, 1) == [False]
    assert table.commit([handle.handle_id], ANNA, 2) == [True]
    assert table.pin([b"a"], BERT, 10, 2, are_arriving=True) == [None]
    assert table.release([late.handle_id], BERT, 3) == [True]
    table.check_integrity()


@pytest.mark.parametrize("is_late", [False, True])
def test_memory_of_a_write_that_failed_is_free_when_its_early_readers_have_ended(is_late):
    table = table_of(4)
    (handle,) = table.reserve([chunk("a")], ANNA, 10, 0)
    (early,) = table.pin([b"a"], BERT, 60, 0, are_arriving=True)
    assert table.abort([handle.handle_id], ANNA, 11 if is_late else 1) == [not is_late]
    assert levels(table).free_bytes == 3 * GRANULE
    table.check_integrity()
    assert table.release([early.handle_id], BERT, 12) == [False]
    assert levels(table).free_bytes == 4 * GRANULE
    table.check_integrity()


def test_handle_belongs_to_its_user_and_is_used_once():
    table = table_of(4)
    (write,) = table.reserve([chunk("a")], ANNA, 10, 0)
    assert table.commit([write.handle_id], BERT, 0) == [False]
    assert table.release([write.handle_id], ANNA, 0) == [False]
    assert table.commit([write.handle_id], ANNA, 0) == [True]
    (read,) = table.pin([b"a"], ANNA, 10, 0)
    assert table.release([read.handle_id], BERT, 0) == [False]
    assert table.release([read.handle_id] * 2, ANNA, 0) == [True, False]


def test_pinned_chunk_is_kept_and_read_of_dropped_chunk_is_invalid():
    table = table_of(1)
    put(table, chunk("a"))
    (handle,) = table.pin([b"a"], ANNA, 10, 0)
    assert table.reserve([chunk("b")], BERT, 10, 1) == [PutRefusal.NO_SPACE]
    assert table.drop([b"a"], 2) == 1
    assert table.probe([b"a"]) == [Residence.ABSENT]
    assert levels(table).free_bytes == 0, "its reader has not released it"
    assert table.release([handle.handle_id], ANNA, 3) == [False]
    assert levels(table).free_bytes == GRANULE


def test_handles_expire_and_memory_of_silent_reader_is_quarantined():
    table = table_of(1)
    put(table, chunk("a"))
    (handle,) = table.pin([b"a"], ANNA, 10, 0)
    assert table.reserve([chunk("b")], BERT, 10, 10) == [PutRefusal.NO_SPACE]
    assert table.probe([b"a"]) == [Residence.DRAM], "its memory may still be being read"
    assert table.release([handle.handle_id], ANNA, 10) == [False]
    table.drop([b"a"], 10)
    assert levels(table).quarantine_bytes == GRANULE
    assert isinstance(table.reserve([chunk("b")], BERT, 10, 15)[0], WriteHandle)
    table.check_integrity()


def test_put_evicts_none_of_the_chunks_that_a_lost_user_may_still_read():
    table = table_of(8)
    put(table, *[chunk(f"{n}") for n in range(8)])
    table.pin([b"%d" % n for n in range(8)], ANNA, 10, 1)
    table.abandon_user(ANNA, 2)
    table.touch([b"0"], 2)
    assert table.reserve([chunk("x")], BERT, 10, 3) == [PutRefusal.NO_SPACE]
    assert table.stats.num_evicted == {}
    put(table, chunk("x"), user=BERT, now=2 + QUARANTINE_S)
    assert table.stats.num_evicted == {"room": 1}
    table.check_integrity()


class CountingLRU(TailFirstLRU):
    """Counts the chunks that searches for victims examine, of all groups."""

    num_examined = 0

    def victims(self):
        for key in super().victims():
            CountingLRU.num_examined += 1
            yield key


def num_examined_by(reserve):
    before = CountingLRU.num_examined
    return reserve(), CountingLRU.num_examined - before


def counting_table(granules, **options):
    return ChunkTable(granules * GRANULE, TableSettings(CountingLRU, QUARANTINE_S, **options))


def test_many_pinned_chunks_hide_no_victim_and_are_skipped_once_per_batch():
    num_pinned, num_free = 5000, 200
    table = counting_table(num_pinned + num_free)
    names = [f"{n}" for n in range(num_pinned + num_free)]
    put(table, *[chunk(name) for name in names])
    table.touch([name.encode() for name in names[::-1]], 1)  # so that the pinned ones come first
    table.pin([name.encode() for name in names[:num_pinned]], ANNA, 10, 1)
    new = [chunk(f"new {n}") for n in range(num_free)]
    _, num_examined = num_examined_by(lambda: put(table, *new, user=BERT, now=2))
    assert table.stats.num_evicted == {"room": num_free}
    assert num_examined <= num_pinned + num_free
    table.check_integrity()


@pytest.mark.parametrize("is_lost", [False, True])
def test_group_without_a_victim_is_examined_once_until_one_of_its_chunks_is_unused(is_lost):
    num_pinned, num_copies = 500, 300
    table = counting_table(num_pinned + num_copies)
    names = [f"{n}" for n in range(num_pinned)]
    put(table, *[chunk(name) for name in names])
    copies = [chunk(f"copy {n}") for n in range(num_copies)]
    handles = table.reserve(copies, ANNA, 10, 0, CopyTerms(1, 1, 1))
    table.commit([handle.handle_id for handle in handles], ANNA, 0)
    reads = table.pin([name.encode() for name in names], BERT, 60, 1)
    if is_lost:
        table.abandon_user(BERT, 1)

    def reserve_all(name, num_chunks, now):
        sequence = [chunk(f"{name}0")]
        for n in range(1, num_chunks):
            sequence.append(chunk(f"{name}{n}", parent=f"{name}{n - 1}"))
        return table.reserve(sequence, ANNA, 1000, now)

    for batch in ("a", "b"):
        _, num_examined = num_examined_by(lambda name=batch: reserve_all(name, 100, 2))
        assert num_examined <= num_pinned + 100
    assert table.stats.num_evicted == {"copy": 200}
    assert num_examined <= 100, "the second batch has examined the pinned chunks again"
    if not is_lost:
        table.release([reads[7].handle_id], BERT, 3)
    reserve_all("c", 101, 3 + QUARANTINE_S)
    assert table.stats.num_evicted["room"] >= 1
    assert table.probe([b"7"]) == [Residence.ABSENT]
    table.check_integrity()


def test_searches_of_a_batch_skip_a_bounded_number_of_chunks(monkeypatch):
    monkeypatch.setattr(victim_choice, "MAX_SKIPPED", 50)
    table = counting_table(300)
    put(table, *[chunk(f"{n}") for n in range(200)])
    copies = [chunk(f"copy {n}") for n in range(100)]
    handles = table.reserve(copies, ANNA, 10, 0, CopyTerms(1, 1, 1))
    table.commit([handle.handle_id for handle in handles], ANNA, 0)
    table.pin([b"%d" % n for n in range(200)], BERT, 60, 1)
    new = [chunk(f"new {n}") for n in range(20)]
    handles, num_examined = num_examined_by(lambda: table.reserve(new, ANNA, 10, 2))
    assert all(isinstance(handle, WriteHandle) for handle in handles)
    assert num_examined <= 50 + 20 * victim_choice.SKIPPED_PER_VICTIM + 20
    table.check_integrity()


def test_only_chunk_is_evicted_for_another_sequence_than_its_own():
    table = table_of(1)
    put(table, chunk("a"))
    assert table.reserve([chunk("b", parent="a")], ANNA, 10, 1) == [PutRefusal.NO_SPACE]
    put(table, chunk("c"), now=1)
    assert table.stats.num_evicted == {"room": 1}


def test_victims_found_in_advance_are_kept_if_they_are_used_or_pinned_meanwhile():
    table = table_of(30)
    put(table, *[chunk(f"{n}") for n in range(30)])
    table.touch([b"%d" % n for n in range(30)[::-1]], 1)
    table.pin([b"%d" % n for n in range(16)], ANNA, 10, 1)
    table.reserve([chunk("x")], BERT, 10, 2)  # evicts 16, and finds 17 to 19
    table.pin([b"17"], ANNA, 10, 3)
    table.reserve([chunk("y")], BERT, 10, 3)
    table.touch([b"19"], 4)
    table.reserve([chunk("z")], BERT, 10, 4)
    gone = [n for n in range(30) if table.probe([b"%d" % n]) == [Residence.ABSENT]]
    assert gone == [16, 18, 20]
    table.check_integrity()


def test_late_writer_cannot_commit_and_keeps_memory_until_it_reports():
    table = table_of(2)
    (late,) = table.reserve([chunk("a")], ANNA, 10, 0)
    (again,) = table.reserve([chunk("a")], BERT, 10, 10)
    assert again.offset != late.offset
    assert table.commit([again.handle_id], BERT, 11) == [True]
    assert levels(table).abandoned_bytes == GRANULE
    assert table.reserve([chunk("b", parent="a")], BERT, 10, 1e6) == [PutRefusal.NO_SPACE]
    assert table.commit([late.handle_id], ANNA, 1e6) == [False]
    assert isinstance(table.reserve([chunk("b", parent="a")], BERT, 10, 1e6)[0], WriteHandle)
    table.check_integrity()


@pytest.mark.parametrize("is_late", [False, True])
def test_memory_of_a_failed_write_is_not_reused_while_its_data_may_still_arrive(is_late):
    table = table_of(1)
    table.set_transfer_timeout(ANNA, 60)
    (failed,) = table.reserve([chunk("a")], ANNA, 1 if is_late else 10, 0)
    aborted = table.abort([failed.handle_id], ANNA, 2, may_still_arrive=True)
    assert aborted == [not is_late]
    table.check_integrity()
    until = 2 + 60 + QUARANTINE_MARGIN_S
    assert table.reserve([chunk("b")], BERT, 10, until - 1) == [PutRefusal.NO_SPACE]
    assert levels(table).quarantine_bytes == GRANULE
    assert isinstance(table.reserve([chunk("b")], BERT, 10, until)[0], WriteHandle)


@pytest.mark.parametrize("is_drained", [False, True])
def test_memory_of_an_ended_user_is_quarantined_unless_it_is_drained(is_drained):
    table = table_of(2)
    put(table, chunk("r"))
    table.pin([b"r"], ANNA, 10, 0)
    table.reserve([chunk("w")], ANNA, 10, 0)
    table.end_user(ANNA, 1, is_drained=is_drained)
    table.check_integrity()
    assert levels(table).quarantine_bytes == GRANULE, "data of the write may still arrive"
    table.drop([b"r"], 2)
    assert levels(table).quarantine_bytes == (1 if is_drained else 2) * GRANULE
    table.expire(1 + QUARANTINE_S)
    assert levels(table).free_bytes == 2 * GRANULE


def test_memory_of_disconnected_user_is_kept_until_its_writers_exit():
    table = table_of(2)
    put(table, chunk("r"))
    table.pin([b"r"], ANNA, 10, 0)
    (late,) = table.reserve([chunk("w")], ANNA, 10, 0)
    assert table.abandon_user(ANNA, 1)
    table.check_integrity()
    assert (levels(table).num_pins, levels(table).abandoned_bytes) == (0, GRANULE)
    (again,) = table.reserve([chunk("w")], BERT, 10, 1e6)
    assert again.offset != late.offset, "the first one may be being written"
    assert table.reserve([chunk("x")], BERT, 10, 1e6) == [PutRefusal.NO_SPACE]
    assert table.commit([late.handle_id], ANNA, 1e6) == [False]
    assert isinstance(table.reserve([chunk("x")], BERT, 10, 1e6)[0], WriteHandle)
    table.check_integrity()


def test_reconnected_user_names_its_writes_in_flight():
    table = table_of(3)
    ended, moving = table.reserve([chunk("a"), chunk("b")], ANNA, 10, 0)
    assert table.abandon_user(ANNA, 1)
    table.resume_user(ANNA, [moving.handle_id], 2)
    table.check_integrity()
    assert (levels(table).quarantine_bytes, levels(table).abandoned_bytes) == (GRANULE, GRANULE)
    assert table.commit([ended.handle_id, moving.handle_id], ANNA, 3) == [False, False]
    assert levels(table).free_bytes == 2 * GRANULE
    table.expire(2 + QUARANTINE_S)
    assert levels(table).free_bytes == 3 * GRANULE
    table.check_integrity()


def test_abandoned_user_without_writes_needs_no_end():
    table = table_of(1)
    put(table, chunk("a"))
    table.pin([b"a"], ANNA, 10, 0)
    assert not table.abandon_user(ANNA, 1)
    assert levels(table).num_pins == 0


def test_quarantine_of_a_late_reader_exceeds_its_transfer_timeout():
    table = table_of(2)
    put(table, chunk("a"), chunk("b"))
    table.set_transfer_timeout(ANNA, 60)
    table.set_transfer_timeout(BERT, QUARANTINE_S - 1)
    for user, name in ((ANNA, b"a"), (BERT, b"b")):
        table.pin([name], user, 10, 0)
        table.abandon_user(user, 0)
        table.drop([name], 0)
    table.expire(QUARANTINE_S - 1 + QUARANTINE_MARGIN_S)
    assert levels(table).free_bytes == GRANULE
    table.expire(60 + QUARANTINE_MARGIN_S - 0.1)
    assert levels(table).free_bytes == GRANULE
    table.expire(60 + QUARANTINE_MARGIN_S)
    assert levels(table).free_bytes == 2 * GRANULE


def test_read_can_be_extended():
    table = table_of(1)
    put(table, chunk("a"))
    (handle,) = table.pin([b"a"], ANNA, 2, 0)
    table.extend([handle.handle_id], ANNA, 10, 1)
    assert table.release([handle.handle_id], ANNA, 5) == [True]


def test_end_of_a_sequence_is_evicted_first_and_never_the_parent_of_a_write():
    table = table_of(4)
    for position, name in enumerate("abc"):  # committed one by one, as they are computed
        put(table, chunk(name, "abc"[position - 1] if position else None), now=position)
    put(table, chunk("x"), now=9)
    put(table, chunk("y"), now=10)
    assert table.probe([b"a", b"b", b"c"]) == [Residence.DRAM, Residence.DRAM, Residence.ABSENT]
    table.pin([b"b"], ANNA, 5, 11)
    put(table, chunk("z"), now=11)
    assert table.probe([b"a", b"b", b"x"]) == [Residence.DRAM, Residence.DRAM, Residence.ABSENT]


def test_sequence_longer_than_the_arena_keeps_its_prefix():
    table = table_of(3)
    put(table, chunk("x"))
    names = "abcdef"
    chunks = [chunk(n, names[i - 1] if i else None, position=i) for i, n in enumerate(names)]
    handles = table.reserve(chunks, ANNA, 10, 1)
    assert handles[3:] == [PutRefusal.NO_SPACE] * 3
    assert table.commit([handle.handle_id for handle in handles[:3]], ANNA, 1) == [True] * 3
    assert (
        table.reserve(chunks, ANNA, 10, 2) == [PutRefusal.PRESENT] * 3 + [PutRefusal.NO_SPACE] * 3
    )
    assert table.probe([b"a", b"b", b"c", b"x"]) == [Residence.DRAM] * 3 + [Residence.ABSENT]


def test_tenant_with_a_quota_evicts_only_its_own_chunks():
    table = table_of(8, quotas={"t": 2 * GRANULE, "tiny": 1})
    put(table, *(chunk(name) for name in "abcd"))
    for name in "uvwx":
        put(table, chunk(name, tenant="t"), now=1)
    assert table.probe([b"u", b"v"]) == [Residence.ABSENT] * 2
    assert Residence.ABSENT not in table.probe([b"a", b"b", b"c", b"d", b"w", b"x"])
    assert table.stats.num_evicted == {"quota": 2}
    assert table.reserve([chunk("z", tenant="tiny")], ANNA, 1, 1) == [PutRefusal.OVER_QUOTA]
    put(table, *(chunk(name) for name in "efgh"), now=2)
    assert table.stats.num_evicted == {"quota": 2, "room": 2}
    table.check_integrity()


def test_flood_of_a_tenant_with_a_quota_costs_other_tenants_no_hit():
    table = table_of(16, quotas={"a": 4 * GRANULE, "b": 4 * GRANULE})
    put(table, *(chunk(f"shared{i}") for i in range(8)))
    for tenant in "ab":
        put(table, *(chunk(f"{tenant}{i}", tenant=tenant) for i in range(4)))
    for number in range(200):
        put(table, chunk(f"flood{number}", tenant="a"), now=1 + number)
    others = [
        f"{name}{i}".encode() for name, count in (("b", 4), ("shared", 8)) for i in range(count)
    ]
    assert table.probe(others) == [Residence.DRAM] * 12
    assert table.stats.num_evicted == {"quota": 200}
    last = [f"flood{number}".encode() for number in range(196, 200)]
    assert table.probe(last) == [Residence.DRAM] * 4
    table.check_integrity()


def test_chunk_larger_than_the_arena_evicts_nothing():
    table = table_of(2)
    put(table, chunk("a"))
    assert table.reserve([chunk("b", granules=3)], ANNA, 1, 0) == [PutRefusal.TOO_LARGE]
    assert table.probe([b"a"]) == [Residence.DRAM]


def test_handles_per_user_are_bounded(monkeypatch):
    monkeypatch.setattr("mooncake_kv.store.chunk_handles.MAX_HANDLES_PER_USER", 2)
    table = table_of(4)
    put(table, chunk("a"))
    assert table.pin([b"a"] * 3, ANNA, 10, 0)[2] is None
    assert table.reserve([chunk("b")], ANNA, 10, 0) == [PutRefusal.NO_SPACE]
    assert levels(table).free_bytes == 3 * GRANULE
    table.check_integrity()


# -- the property -------------------------------------------------------------------------------


@dataclass
class Write:
    """A write in flight: it lands granule by granule, at any time."""

    handle: WriteHandle
    user: int
    missing: list[int]


@dataclass
class World:
    """Users over one arena, with one-sided reads and writes that are late, frozen or killed.

    ``memory`` has, for each granule, the name of the last chunk written there. ``frozen`` has the
    writes of disconnected users: each may land at any time, until the user reconnects and reports
    which of them have ended, or its processes have exited and their bytes in flight have landed.
    """

    seed: int
    policy: str = "tail-first-lru"
    granules: int = 48
    now: float = 0.0
    memory: list[bytes] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    reads: list[tuple[ReadHandle, int, float]] = field(default_factory=list)
    zombies: list[tuple[float, Write]] = field(default_factory=list)
    users: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    frozen: dict[int, list[Write]] = field(default_factory=dict)
    num_users: int = 4
    num_valid: int = 0
    num_invalid: int = 0
    num_refusals: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.memory = [b""] * self.granules
        settings_of = TableSettings(
            POLICIES[self.policy], QUARANTINE_S, quotas={"t": self.granules // 4 * GRANULE}
        )
        self.table = ChunkTable(self.granules * GRANULE, settings_of)
        self.steps = (
            [self.reserve] * 5
            + [self.land] * 8
            + [self.end_write] * 4
            + [self.pin] * 4
            + [self.release] * 4
            + [self.kill_or_wait, self.drop]
        )

    def run(self, num_steps):
        for number in range(num_steps):
            self.random.choice(self.steps)()
            self.now += self.random.expovariate(20)
            if number % 199 == 0:
                self.table.check_integrity()
        self.table.check_integrity()

    def sequence(self):
        """Keys of one of several sequences that share prefixes; sizes differ by sequence."""
        family, branch = self.random.randrange(4), self.random.randrange(6)
        shared = self.random.randrange(3)
        granules, tenant = 1 + family % 3, "t" if family == 3 else ""
        chunks, parent = [], None
        for position in range(self.random.randrange(1, 7)):
            name = f"{family}.{branch if position > shared else 0}.{position}"
            chunks.append(chunk(name, parent, granules, position, tenant))
            parent = name
        return chunks

    def reserve(self):
        user = self.random.choice(self.users)
        copy = CopyTerms(1, self.random.expovariate(1), 1.0) if self.random.random() < 0.3 else None
        lease_s = self.random.uniform(0.05, 3)
        sequence = self.sequence()
        handles = self.table.reserve(sequence, user, lease_s, self.now, copy)
        if PutRefusal.NO_SPACE in handles and self.policy == "tail-first-lru":
            self.check_refusal(sequence[handles.index(PutRefusal.NO_SPACE)])
        for handle in handles:
            if isinstance(handle, WriteHandle):
                first = handle.offset // GRANULE
                missing = list(range(first, first + handle.nbytes // GRANULE))
                self.writes.append(Write(handle, user, missing))

    def check_refusal(self, refused):
        """No remembered search for victims has missed one. With other policies, chunks that were
        touched since may come before those that protect them."""
        victims = self.table._victims
        found = victims.victims_for(refused, self.now)
        for group in victims._groups.values():
            group.none = None
        victims.begin(1)
        assert bool(victims.victims_for(refused, self.now)) == bool(found)
        self.num_refusals += 1

    def land(self):
        """Land a piece of some write; its user may be frozen or dead."""
        self.zombies = [(until, write) for until, write in self.zombies if until > self.now]
        candidates = self.writes + [write for _, write in self.zombies]
        if self.random.random() < 0.05:  # they are thawed rarely, and late
            candidates += [write for writes in self.frozen.values() for write in writes]
        for write in self.random.sample(candidates, min(len(candidates), 6)):
            for at in write.missing:
                self.memory[at] = write.handle.key
            if self.random.random() < 0.7:
                write.missing.clear()

    def end_write(self):
        for _ in range(min(len(self.writes), self.random.randrange(8))):
            self.end_one_write()

    def end_one_write(self):
        write = self.writes.pop(self.random.randrange(len(self.writes)))
        ids = [write.handle.handle_id]
        if write.missing or self.random.random() < 0.1:
            self.table.abort(ids, write.user, self.now)
        else:
            self.table.commit(ids, write.user, self.now)

    def pin(self):
        user, keys = self.random.choice(self.users), [c.key for c in self.sequence()]
        lease_s = self.random.uniform(0.05, 3)
        self.table.touch(keys, self.now)
        for handle in self.table.pin(keys, user, lease_s, self.now):
            if handle is not None:
                self.reads.append((handle, user, self.now + handle.lease_s))

    def release(self):
        for _ in range(min(len(self.reads), self.random.randrange(8))):
            self.release_one()

    def release_one(self):
        handle, user, deadline = self.reads.pop(self.random.randrange(len(self.reads)))
        first = handle.offset // GRANULE
        found = self.memory[first : first + handle.nbytes // GRANULE]
        (valid,) = self.table.release([handle.handle_id], user, self.now)
        if valid:
            assert set(found) == {handle.key}, "bytes of another key"
            assert self.now < deadline, "a handle outlived its deadline"
        self.num_valid += valid
        self.num_invalid += not valid

    def lose(self):
        """Disconnect a user, for whatever reason; its reads never end."""
        user = self.users.pop(self.random.randrange(len(self.users)))
        if len(self.users) < 4:
            self.users.append(self.num_users)
            self.num_users += 1
        self.frozen[user] = [write for write in self.writes if write.user == user]
        self.writes = [write for write in self.writes if write.user != user]
        self.reads = [read for read in self.reads if read[1] != user]
        has_writes = self.table.abandon_user(user, self.now)
        assert has_writes == bool(self.frozen[user])

    def pop_frozen(self):
        user = self.random.choice(sorted(self.frozen))
        return user, self.frozen.pop(user)

    def end_frozen(self):
        """Exit the processes of a disconnected user; their bytes in flight land for a while."""
        user, writes = self.pop_frozen()
        until = self.now + QUARANTINE_S
        self.zombies += [(until, write) for write in writes]
        self.table.end_user(user, self.now, is_drained=False)

    def thaw(self):
        """Reconnect a user: some of its writes have ended, others are still in flight."""
        user, writes = self.pop_frozen()
        moving = [write for write in writes if self.random.random() < 0.5]
        self.table.resume_user(user, [write.handle.handle_id for write in moving], self.now)
        self.writes += moving
        self.users.append(user)

    def drop(self):
        self.table.drop([c.key for c in self.sequence()[:2]], self.now)

    def kill_or_wait(self):
        chance = self.random.random()
        if chance < 0.1:
            self.lose()
        elif chance < 0.2:
            self.now += self.random.uniform(0, 8)
        elif self.frozen and chance < 0.35:
            self.random.choice([self.end_frozen, self.thaw])()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(sorted(POLICIES)), st.integers(4, 60))
def test_no_read_is_ever_wrong(seed, policy, granules):
    World(seed, policy, granules).run(400)


@pytest.mark.timeout(300)
def test_no_read_is_ever_wrong_in_a_hundred_thousand_operations():
    world = World(20)
    world.run(100_000)
    assert world.num_valid > 5000
    assert world.num_invalid > 200
    assert world.num_refusals > 200
    assert world.table.stats.num_evicted["room"] > 5000
    assert world.table.stats.num_expired_writes > 200
    # all users disconnect, and every byte is freed
    assert world.num_users > 50
    for user in [*world.users, *world.frozen]:
        world.table.end_user(user, world.now, is_drained=False)
    world.table.drop([c.key for c in world.table.ready_chunks()], world.now)
    world.table.expire(world.now + QUARANTINE_S + 3)
    assert levels(world.table).free_bytes == world.granules * GRANULE


def test_chunk_named_twice_with_two_sizes_gets_memory_of_its_handle():
    """Otherwise its write would overwrite the chunks behind it, which readers would consider
    valid."""
    table = table_of(64)
    put(table, chunk("other"))
    first, second = table.reserve([chunk("a", granules=8), chunk("a")], ANNA, 10, 1)
    assert (first.nbytes, second) == (8 * GRANULE, PutRefusal.STAGING)
    behind = table.reserve([chunk("b"), chunk("c")], BERT, 10, 1)
    assert all(not first.offset <= handle.offset < first.offset + first.nbytes for handle in behind)
    table.check_integrity()


def test_chunk_that_cannot_fit_evicts_nothing():
    table = table_of(64)
    put(table, *[chunk(f"{n}") for n in range(64)])
    table.pin([b"30"], BERT, 10, 1)
    assert table.reserve([chunk("huge", granules=64)], ANNA, 10, 1) == [PutRefusal.NO_SPACE]
    assert table.stats.num_evicted == {}


def test_chunk_larger_than_its_tenants_quota_evicts_nothing():
    table = table_of(64, quotas={"anna": 4 * GRANULE})
    put(table, *[chunk(f"{n}", tenant="anna") for n in range(4)])
    large = chunk("large", granules=5, tenant="anna")
    assert table.reserve([large], ANNA, 10, 1) == [PutRefusal.OVER_QUOTA]
    assert table.stats.num_evicted == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_large_chunk_evicts_adjacent_small_chunks(policy):
    table = ChunkTable(512 * GRANULE, TableSettings(POLICIES[policy], QUARANTINE_S))
    put(table, *[chunk(f"{n}") for n in range(512)])
    draw = random.Random(3)
    for now in range(2000):
        table.touch([b"%d" % draw.randrange(512)], now)
    for n in range(0, 512, 50):
        table.pin([b"%d" % n], BERT, 1e6, 2000)
    for n in range(4):
        put(table, chunk(f"large {n}", granules=16), now=2000)
    assert table.stats.num_evicted == {"room": 4 * 16}
    table.check_integrity()


def test_large_chunk_evicts_another_adjacent_group_if_oldest_has_none():
    table = table_of(64, quotas={"anna": 8 * GRANULE})
    put(table, chunk("0"), chunk("a", tenant="anna"), chunk("1"), now=0)
    put(table, *[chunk(f"{n}") for n in range(2, 63)], now=1)
    table.pin([b"0", b"1"], BERT, 10, 1)
    put(table, chunk("large", granules=8), now=2)
    assert table.probe([b"a"]) == [Residence.DRAM]
    assert table.stats.num_evicted == {"room": 8}
    table.check_integrity()


def test_large_chunk_keeps_its_parents_and_cannot_use_quarantined_memory():
    table = table_of(8)
    put(table, chunk("a"), chunk("b", parent="a"), chunk("c", parent="b"), now=0)
    put(table, *[chunk(f"{n}") for n in range(5)], now=1)
    assert table.reserve([chunk("d", parent="c", granules=6)], ANNA, 10, 2) == [PutRefusal.NO_SPACE]
    table.pin([b"2"], BERT, 1, 2)  # and never releases it
    assert table.reserve([chunk("d", parent="c", granules=5)], ANNA, 10, 3) == [PutRefusal.NO_SPACE]
    assert table.stats.num_evicted == {}
    put(table, chunk("d", parent="c", granules=5), now=3 + QUARANTINE_S)
    assert table.probe([b"a", b"b", b"c", b"d"]) == [Residence.DRAM] * 4
    table.check_integrity()


def num_lines_run(call):
    """Lines of the store's code that a call runs: its work, whatever the computer does besides."""
    num_lines = 0

    def trace(frame, event, _):
        nonlocal num_lines
        num_lines += event == "line"
        return trace if "mooncake_kv" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines


def lines_of_a_batch(table, chunks):
    handles = []
    num_lines = num_lines_run(lambda: handles.extend(table.reserve(chunks, ANNA, 10, 2)))
    assert all(isinstance(handle, WriteHandle) for handle in handles)
    table.check_integrity()
    return num_lines


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_before_a_batch_of_large_chunks_are_found_once(policy):
    def lines(num_before):
        table = ChunkTable(1300 * GRANULE, TableSettings(POLICIES[policy], QUARANTINE_S))
        put(table, *[chunk(f"{n}") for n in range(1300 - num_before)])
        before = [chunk("b0")]
        before += [chunk(f"b{n}", f"b{n - 1}", 1, n) for n in range(1, num_before)]
        put(table, *before, now=1)
        batch = [chunk(f"b{n}", f"b{n - 1}", 3, n) for n in range(num_before, num_before + 64)]
        found = lines_of_a_batch(table, batch)
        assert table.probe([b"b%d" % n for n in range(num_before)]) == (
            [Residence.DRAM] * num_before
        )
        return found

    assert lines(1000) < 2 * lines(50)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_without_adjacent_ones_are_examined_once_per_batch(policy):
    def lines(num_lone):
        table = ChunkTable((2 * num_lone + 400) * GRANULE, TableSettings(POLICIES[policy]))
        names = [f"{n}" for n in range(2 * num_lone + 400)]
        put(table, *[chunk(name) for name in names])
        table.pin([name.encode() for name in names[: 2 * num_lone : 2]], BERT, 60, 1)
        table.touch([name.encode() for name in names[2 * num_lone :]], 1)
        return lines_of_a_batch(table, [chunk(f"new {n}", granules=2) for n in range(64)])

    assert lines(200) < 3 * lines(10)


def test_copy_must_be_worth_more_than_all_that_it_evicts():
    table = table_of(8)
    put(table, *[chunk(f"{n}") for n in range(8)], now=0)
    terms = CopyTerms(1, 1.0, 1.0)
    assert table.reserve([chunk("a", granules=8)], ANNA, 10, 1, terms) == [PutRefusal.LOW_VALUE]
    assert isinstance(table.reserve([chunk("b")], ANNA, 10, 1, terms)[0], WriteHandle)
    assert table.stats.num_evicted == {"room": 1}
