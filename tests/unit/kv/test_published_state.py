"""A snapshot gives a new subscriber the same state as all published events."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from mooncake_kv import published_state
from mooncake_kv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from mooncake_kv.published_state import PublishedState

SIZE = 2
MEDIUMS = ["GPU", "CPU", "STORAGE"]


def stored(number: int, medium: str, *, follows: bool, has_tokens: bool = True) -> BlockStored:
    """A block, the child of the one before it; every third prompt has a salt."""
    parent = number - 1 if follows else None
    tokens = [number, number + 1000] if has_tokens else []
    extra = [["salt"]] if not follows and number % 3 == 0 else None
    return BlockStored([number], parent, tokens, SIZE, None, medium, None, extra, "model")


steps = st.one_of(
    st.builds(
        stored,
        st.integers(1, 12),
        st.sampled_from(MEDIUMS),
        follows=st.booleans(),
    ),
    st.builds(BlockRemoved, st.lists(st.integers(1, 12), max_size=4), st.sampled_from(MEDIUMS)),
    st.just(AllBlocksCleared()),
)


def held(state: PublishedState) -> dict[int, tuple]:
    return {
        name: (block.kind, block.parent, block.token_ids, block.extra_keys, set(block.mediums))
        for name, block in state._blocks.items()
    }


@given(st.lists(steps, max_size=40), st.integers(1, 4))
@settings(deadline=None, max_examples=200)
def test_snapshot_restores_all_blocks_with_parents_first(events: list[KVEvent], limit) -> None:
    known, rebuilt = PublishedState(), PublishedState()
    known.apply(events)
    before, published_state.MAX_EVENT_BLOCKS = published_state.MAX_EVENT_BLOCKS, limit
    try:
        snapshot = list(known.snapshot())
    finally:
        published_state.MAX_EVENT_BLOCKS = before
    assert snapshot[0] == AllBlocksCleared()
    rebuilt.apply(snapshot)
    assert held(rebuilt) == held(known)
    named: set[int] = set()
    for event in snapshot[1:]:
        assert isinstance(event, BlockStored)
        assert len(event.block_hashes) <= limit
        if event.token_ids:
            is_there = event.parent_block_hash in known._blocks
            assert not is_there or event.parent_block_hash in named
            named |= set(event.block_hashes)


def test_blocks_of_one_prompt_are_one_event() -> None:
    state = PublishedState()
    state.apply([stored(number, "CPU", follows=number > 1) for number in range(1, 6)])
    state.apply([stored(number, "STORAGE", follows=True, has_tokens=False) for number in (2, 3)])
    _, first, elsewhere = state.snapshot()
    assert isinstance(first, BlockStored)
    assert isinstance(elsewhere, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([1, 2, 3, 4, 5], None)
    assert first.token_ids == [token for n in range(1, 6) for token in (n, n + 1000)]
    assert (elsewhere.block_hashes, elsewhere.medium) == ([2, 3], "STORAGE")
    assert not elsewhere.token_ids


def test_tokens_added_later_are_kept() -> None:
    state = PublishedState()
    state.apply(
        [stored(1, "STORAGE", follows=False, has_tokens=False), stored(1, "CPU", follows=False)]
    )
    _, first, elsewhere = state.snapshot()
    assert isinstance(first, BlockStored)
    assert isinstance(elsewhere, BlockStored)
    assert (first.medium, first.token_ids, elsewhere.medium) == ("STORAGE", [1, 1001], "CPU")
