"""Blocks of sliding windows are held until their chunks are saved, and no longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.vllm_instance import FakeRequest, picture

from mooncake_hal.kv.geometry import KVGroup
from mooncake_kv.errors import KVConfigError
from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.store.chunk_keys import KVIdentity
from mooncake_vllm.vllm_pool_saves import PoolSaves
from mooncake_vllm.vllm_window_blocks import HELD_SHARE, WindowBlocks

CHUNK, BLOCK, WINDOW = 8, 4, 10
STEP = 16
FULL, SLIDING = KVGroup((0,)), KVGroup((1,), WINDOW)
IDENTITY = KVIdentity("model", "float32", CHUNK)
PROMPT = [*range(40)]
NUM_BLOCKS = 30 * HELD_SHARE


class Blocks:
    """vLLM's block pool: counts the references that were added."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks: Sequence[Any] = range(num_blocks)
        self.references: dict[int, int] = {}
        self.cached_block_hash_to_block: object = None

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]

    @property
    def held(self) -> list[int]:
        return sorted(self.references)


class Instance:
    """An instance with a request of 40 tokens in two groups: full attention has its blocks 1, 2,
    ..., the windows 51, 52, ...; a step computes 16 tokens of a prompt."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.pool = Blocks(num_blocks)
        self.windows = WindowBlocks([FULL, SLIDING], CHUNK, BLOCK)
        self.windows.bind(self.pool)
        self.offered: dict[str, SaveRequest] = {}
        self.is_refused = False
        self.reported: list[str] = []
        self.saves = PoolSaves(
            self, 1, self.windows, publishes_tokens=lambda: False, report=self.reported.append
        )
        self.request = FakeRequest("a", PROMPT)
        self.saves.add(self.request, IDENTITY)
        self._num_blocks = 0

    def save(self, save: SaveRequest) -> bool:
        if not self.is_refused:
            self.offered[save.save_id] = save
        return not self.is_refused

    def end_save(self, save_id: str, *, is_unchanged: bool) -> None:
        self.was_unchanged = is_unchanged

    def begin(self, num_initial_tokens: int = 0, num_tokens: int = STEP) -> None:
        """Schedule the first step. Blocks that have left the window are missing."""
        self._num_blocks = 0
        full, sliding = self._allocate(num_initial_tokens + num_tokens)
        num_missing = max(0, num_initial_tokens - WINDOW + 1) // BLOCK
        new = SimpleNamespace(
            req_id="a",
            block_ids=(full, [0] * num_missing + sliding[num_missing:]),
            num_computed_tokens=num_initial_tokens,
        )
        self._schedule([new], [], num_initial_tokens, num_tokens)

    def step(self, num_tokens: int = STEP) -> None:
        """End the scheduled step, and schedule the next one."""
        done = self.request.num_computed_tokens
        self._schedule([], ["a"], done, num_tokens)

    def _allocate(self, num_tokens: int) -> tuple[list[int], list[int]]:
        first, self._num_blocks = self._num_blocks, -(-num_tokens // BLOCK)
        new = range(first + 1, self._num_blocks + 1)
        return list(new), [50 + block for block in new]

    def _schedule(self, new: list[Any], known: list[str], done: int, num_tokens: int) -> None:
        cached = SimpleNamespace(
            req_ids=known,
            resumed_req_ids=set(),
            new_block_ids=[self._allocate(done + num_tokens) for _ in known],
            num_computed_tokens=[done] * len(known),
        )
        step: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"a": num_tokens},
        )
        self.request.num_in_flight_tokens = 0
        self.saves.process_step(step)
        self.request.num_computed_tokens = done + num_tokens

    def copy(self, *, refused_chunk: int | None = None) -> list[tuple[int, int]]:
        """Complete all copies; returns their chunks."""
        ended, self.offered = self.offered, {}
        for save_id in ended:
            self.saves.copied(ChunksCopied(save_id, refused_chunk=refused_chunk))
        return [(each.first_chunk, len(each.keys)) for each in ended.values()]

    def end(self, status: str = "FINISHED_LENGTH_CAPPED") -> bool:
        self.request.status = SimpleNamespace(name=status)
        return self.saves.end(self.request, ((), ()))


def test_blocks_are_held_from_the_step_that_fills_a_chunk_until_it_is_copied() -> None:
    it = Instance()
    it.begin()
    assert it.pool.held == [51, 52, 53, 54]
    assert not it.offered
    it.step()
    [save] = it.offered.values()
    assert (save.first_chunk, len(save.keys)) == (0, 2)
    assert save.block_ids[:8] == [1, 51, 2, 52, 3, 53, 4, 54]
    assert it.pool.held == [*range(51, 59)]
    it.copy()
    assert it.pool.held == [*range(51, 59)], "the client's thread touches nothing of vLLM's"
    it.windows.free_released()
    assert it.pool.held == [55, 56, 57, 58]
    assert it.was_unchanged


def test_chunks_of_the_answer_are_saved_while_it_is_computed() -> None:
    it = Instance()
    it.begin()
    it.step()
    it.step(num_tokens=8)
    it.request.output_token_ids = [7]
    for _ in range(9):
        it.step(num_tokens=1)
        it.request.output_token_ids = [*it.request.output_token_ids, 7]
    assert it.copy() == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert not it.end()
    assert it.pool.held == []


def test_last_chunks_are_saved_at_the_end_from_held_blocks() -> None:
    it = Instance()
    it.begin()
    it.step()
    it.step(num_tokens=8)
    it.request.output_token_ids = [7]
    assert it.end()
    assert it.copy() == [(0, 2), (2, 4), (4, 5)]
    it.windows.free_released()
    assert it.pool.held == []
    assert it.reported == ["a"]


def test_prefix_from_vllms_cache_is_completed() -> None:
    """Of 36 cached tokens, the window has kept those from 24 on, so the fifth chunk has all of its
    blocks. The stores have the four before it."""
    it = Instance()
    it.saves.note_known("a", 4)
    it.begin(num_initial_tokens=36, num_tokens=4)
    assert it.pool.held == [59, 60]
    it.request.output_token_ids = [7]
    it.step(num_tokens=1)
    assert it.copy() == [(4, 5)]


def test_chunks_without_a_saved_prefix_are_not_saved() -> None:
    """Blocks of its second chunk have left the window, and no store has that chunk."""
    it = Instance()
    it.saves.note_known("a", 1)
    it.begin(num_initial_tokens=24)
    it.step(num_tokens=1)
    assert not it.offered
    assert it.pool.held == []
    assert it.windows.num_dropped == 1
    assert not it.end()


def test_next_turn_of_session_is_saved_with_the_turn_before() -> None:
    """The first turn's step ends in the moment in which the client continues. vLLM's table has lost
    the first of its blocks by then, which is still held."""
    it = Instance()
    it.request.prompt_token_ids = PROMPT[:STEP]
    it.begin()
    it.request.prompt_token_ids = PROMPT
    it.begin(num_initial_tokens=STEP)
    [save] = it.offered.values()
    assert save.block_ids[:8] == [1, 51, 2, 52, 3, 53, 4, 54]
    it.step(num_tokens=8)
    it.step(num_tokens=0)
    assert it.copy() == [(0, 2), (2, 4)]
    assert not it.windows.num_dropped


def test_refused_chunk_leaves_no_gap_for_the_next_turn_of_a_session() -> None:
    """Its blocks are lost, so nothing is saved after it."""
    it = Instance()
    it.begin()
    it.step()
    assert it.copy(refused_chunk=0) == [(0, 2)]
    it.begin(num_initial_tokens=2 * STEP, num_tokens=8)
    it.step(num_tokens=0)
    assert not it.offered
    it.windows.free_released()
    assert it.pool.held == []


def test_rejected_drafts_hold_no_blocks_while_vllm_has_no_step_for_the_request() -> None:
    """vLLM may be paused, and reset its prefix cache, which it can't while blocks are held."""
    it = Instance()
    it.begin()
    it.request.num_computed_tokens = STEP - 1
    it.saves.process_step(idle_step())
    it.copy()
    it.saves.process_step(idle_step())
    assert it.windows.num_held == 0
    it.step(num_tokens=1)
    assert it.pool.held == [53, 54]
    it.step(num_tokens=0)
    assert it.copy() == [(1, 2)]


def test_turn_before_one_with_pictures_is_saved() -> None:
    """The step that was to compute its third chunk did not complete it, as drafts were rejected;
    now the first picture begins within that chunk."""
    it = Instance()
    it.begin(num_tokens=3 * CHUNK)
    assert it.pool.held == [*range(51, 57)]
    it.request.num_computed_tokens = 3 * CHUNK - 2
    it.request.mm_features = [picture(3 * CHUNK - 1)]
    it.begin(num_initial_tokens=3 * CHUNK - 2)
    it.step(num_tokens=0)
    assert it.copy() == [(0, 2)]
    it.windows.free_released()
    assert it.pool.held == []


@pytest.mark.parametrize("offset", [STEP - 1, STEP])
def test_session_that_ends_before_its_turn_with_pictures_is_saved(offset: int) -> None:
    """vLLM appends the pictures when its client sends them, before the turn runs."""
    it = Instance()
    it.begin()
    assert it.windows.num_held > 0
    it.request.mm_features = [picture(offset)]
    it.request.num_computed_tokens = STEP
    assert it.end("FINISHED_ABORTED")
    assert it.copy() == [(0, offset // CHUNK)]
    it.windows.free_released()
    assert it.windows.num_held == 0


def idle_step() -> Any:
    """A step of no requests."""
    known = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
    )
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=known, num_scheduled_tokens={}
    )


def test_at_most_a_share_of_all_blocks_is_held() -> None:
    it = Instance(num_blocks=6 * HELD_SHARE)
    it.pool.blocks = range(100)
    it.begin()
    it.step()
    assert it.pool.held == [*range(51, 57)], "the fourth chunk's would be too many"
    assert it.windows.num_dropped == 1
    assert it.copy() == [(0, 2)]
    it.step(num_tokens=8)
    assert it.copy() == [(2, 3)]
    it.step(num_tokens=0)
    assert not it.offered
    assert it.pool.held == []


@pytest.mark.parametrize("way", ["refused", "full", "preempted", "reset", "failed"])
def test_nothing_is_held_once_a_request_is_not_saved(way: str) -> None:
    it = Instance()
    it.begin()
    it.is_refused = way == "refused"
    it.step()
    if way == "full":
        it.copy(refused_chunk=1)
        it.step(num_tokens=8)
    elif way == "preempted":
        it.request.num_preemptions, it.request.num_computed_tokens = 1, 0
        it._schedule([], [], 0, 0)
        it.copy()
        assert not it.was_unchanged
        it.windows.free_released()
        assert it.pool.held == []
        it.begin()
        assert it.pool.held == [51, 52, 53, 54], "it is saved when it runs again"
        it.end("FINISHED_ERROR")
    elif way == "reset":
        it.saves.forget()
        it.copy()
    elif way == "failed":
        it.copy()
        assert not it.end("FINISHED_ERROR")
    it.windows.free_released()
    assert it.pool.held == []
    assert not it.saves.is_holding


def test_chunk_longer_than_a_window_is_rejected() -> None:
    wanted = "which is 7 tokens: use chunk=N with a multiple of 4 up to 8, the same for all"
    with pytest.raises(KVConfigError, match=wanted):
        WindowBlocks([FULL, SLIDING, KVGroup((1,), 7)], 12, BLOCK)


def test_chunk_of_the_blocks_that_a_window_touches_is_accepted() -> None:
    WindowBlocks([FULL, KVGroup((1,), CHUNK - 1)], CHUNK, BLOCK)


def test_without_windows_nothing_is_held() -> None:
    assert not WindowBlocks([FULL], CHUNK, BLOCK).exist
