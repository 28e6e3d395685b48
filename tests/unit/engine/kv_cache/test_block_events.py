"""KV events always describe exactly the blocks that the prefix cache can find."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings, strategies as st

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.kv_cache.block_pool import extend_block_hashes
from mooncake_kv.kv_events import AllBlocksCleared, BlockStored, KVEventLog, event_key

BLOCK = 4


class Prompt:
    """The attributes of a request that the block manager uses."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.block_ids: list[int] = []
        self.host_block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_published = self.num_computed = self.num_in_flight = 0
        self.num_cached_tokens = self.num_preemptions = 0
        self.prompt_hits: dict[str, int] = {}
        self.sends_kv = self.awaits_scores = False
        self.has_verified_kv = True
        self.spec = SimpleNamespace(cache_salt="")
        self.changed_at: int | None = None


def holds(events) -> set[int]:
    held: set[int] = set()
    for event in events:
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == BLOCK * len(event.block_hashes)
            assert event.parent_block_hash is None or isinstance(event.parent_block_hash, int)
            held |= set(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            held.clear()
        else:
            assert set(event.block_hashes) <= held, "a block that was never stored is removed"
            held -= set(event.block_hashes)
    return held


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=24),
            st.sampled_from(["run", "run", "reset"]),
        ),
        max_size=30,
    )
)
@settings(deadline=None, max_examples=200)
def test_events_match_the_cached_blocks(done) -> None:
    published: list = []
    log = KVEventLog(published.extend, BLOCK)
    manager = BlockManager(7, BLOCK, prefix_caching=True, events=log)
    for tokens, step in done:
        if step == "reset":
            manager.reset_prefix_cache()
        request = Prompt([7, *tokens])
        if manager.allocate(request, len(request.token_ids), cacheable=len(tokens)):
            request.num_computed = len(request.token_ids)
            manager.publish(request)
            manager.release(request)
            manager.pool.release(manager.take_replaced())
        log.flush()
        assert holds(published) == {event_key(digest) for digest in manager.pool._index}


def test_event_names_the_preceding_block_as_parent() -> None:
    published: list = []
    log = KVEventLog(published.extend, BLOCK)
    manager = BlockManager(8, BLOCK, prefix_caching=True, events=log)
    request = Prompt(list(range(12)))
    manager.allocate(request, 12, cacheable=11)
    for computed in (4, 12):
        request.num_computed = computed
        manager.publish(request)
    log.flush()
    chain: list[bytes] = []
    extend_block_hashes(chain, request.token_ids, BLOCK)
    keys = [event_key(digest) for digest in chain]
    found = [(event.block_hashes, event.parent_block_hash, event.token_ids) for event in published]
    assert found == [(keys[:1], None, [0, 1, 2, 3]), (keys[1:], keys[0], list(range(4, 12)))]
