"""The arena's allocator: no memory is lost or owned twice, and neighbours are merged."""

import pytest
from hypothesis import given, strategies as st

from mooncake_kv.store.arena_allocator import GRANULE, ArenaAllocator, rounded_up


def test_ranges_are_whole_granules():
    arena = ArenaAllocator(10 * GRANULE + 5)
    assert arena.capacity == 10 * GRANULE
    first, second = arena.allocate(1), arena.allocate(GRANULE + 1)
    assert (first, second) == (0, GRANULE)
    assert arena.allocated_bytes(second) == 2 * GRANULE == rounded_up(GRANULE + 1)
    assert arena.free_bytes == 7 * GRANULE


def test_arena_can_be_filled_to_the_last_byte_and_emptied_in_any_order():
    arena = ArenaAllocator(64 * GRANULE)
    offsets = [arena.allocate(4 * GRANULE) for _ in range(16)]
    assert arena.allocate(1) is None
    for offset in (*offsets[::2], *reversed(offsets[1::2])):
        arena.free(offset)
        arena.check_integrity()
    assert arena.allocate(64 * GRANULE) == 0


def test_batch_is_contiguous_where_possible_and_uses_all_free_ranges():
    arena = ArenaAllocator(16 * GRANULE)
    held = arena.allocate_many(2 * GRANULE, 4)
    assert list(held) == [0, 2 * GRANULE, 4 * GRANULE, 6 * GRANULE]
    arena.free(held[1])
    rest = arena.allocate_many(2 * GRANULE, 9)
    assert sorted(rest) == [2 * GRANULE, *range(8 * GRANULE, 16 * GRANULE, 2 * GRANULE)]
    assert arena.allocate_many(1, 3) == []
    arena.check_integrity()


def test_freeing_unallocated_memory_is_an_error():
    arena = ArenaAllocator(4 * GRANULE)
    with pytest.raises(KeyError):
        arena.free(0)


@given(st.lists(st.integers(1, 70), max_size=60), st.randoms(use_true_random=False))
def test_any_order_of_sizes_and_frees_conserves_the_arena(sizes, random):
    arena, held = ArenaAllocator(256 * GRANULE), {}
    for size in sizes:
        offset = arena.allocate(size * GRANULE)
        if offset is not None:
            ends = [(o, o + held[o]) for o in held]
            assert all(offset + size * GRANULE <= a or offset >= b for a, b in ends)
            held[offset] = size * GRANULE
        if held and random.random() < 0.5:
            freed = random.choice(list(held))
            del held[freed]
            arena.free(freed)
        assert arena.free_bytes == arena.capacity - sum(held.values())
    arena.check_integrity()
    for offset in held:
        arena.free(offset)
    arena.check_integrity()
    assert arena.allocate(256 * GRANULE) == 0
