"""Which tokens of a request are known to be computed, and when they are saved to the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.vllm_instance import FakeRequest, picture

from mooncake_hal.kv.geometry import KVGroup
from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.store.chunk_keys import KVIdentity, chunk_keys
from mooncake_vllm.vllm_pool_saves import FirstStep, PoolSaves, num_certain_tokens
from mooncake_vllm.vllm_window_blocks import WindowBlocks

PROMPT = [*range(40)]


def ended(
    status: str,
    num_computed: int,
    num_in_flight: int,
    num_preemptions: int = 0,
    num_sampled: int = 0,
) -> FakeRequest:
    """A request of 40 tokens, as vLLM passes it at its end."""
    return FakeRequest(
        "a",
        PROMPT,
        num_computed_tokens=num_computed,
        num_in_flight_tokens=num_in_flight,
        num_preemptions=num_preemptions,
        output_token_ids=[7] * num_sampled,
        status=SimpleNamespace(name=status),
    )


ABORTED = "FINISHED_ABORTED"
CASES = {
    "its client leaves while it queues": (ended(ABORTED, 0, 0), None, 0),
    "it waits for KV from elsewhere": (ended(ABORTED, 32, 0), None, 0),
    "its first step goes on, and may bring what it had": (
        ended(ABORTED, 36, 4),
        FirstStep(0, 32),
        0,
    ),
    "two steps go on": (ended(ABORTED, 40, 8), FirstStep(0, 32), 0),
    "one step is over": (ended(ABORTED, 16, 0), FirstStep(0, 0), 16),
    "one step is over and one goes on": (ended(ABORTED, 32, 16), FirstStep(0, 0), 16),
    "it decodes": (ended(ABORTED, 44, 0, num_sampled=5), FirstStep(0, 0), 44),
    "it decodes, and the next step goes on": (
        ended(ABORTED, 45, 1, num_sampled=5),
        FirstStep(0, 0),
        44,
    ),
    "drafts are checked": (ended(ABORTED, 48, 4, num_sampled=5), FirstStep(0, 0), 44),
    "it was preempted, and waits": (ended(ABORTED, 0, 1, 1, 5), FirstStep(0, 0), 0),
    "it was preempted, and waits for KV": (ended(ABORTED, 32, 0, 1, 5), FirstStep(0, 0), 0),
    "it was preempted, and a step of before goes on": (
        ended(ABORTED, 32, 17, 1, 5),
        FirstStep(1, 16),
        0,
    ),
    "it was preempted, and runs again": (ended(ABORTED, 32, 0, 1, 5), FirstStep(1, 16), 32),
    "its KV did not come": (ended("FINISHED_ERROR", 32, 0), FirstStep(0, 0), 0),
    "it has said all": (ended("FINISHED_LENGTH_CAPPED", 45, 0, num_sampled=5), None, 44),
    "it has stopped, and the next step goes on": (
        ended("FINISHED_STOPPED", 45, 1, num_sampled=5),
        None,
        44,
    ),
    "it repeats itself, and the next step goes on": (
        ended("FINISHED_REPETITION", 45, 1, num_sampled=5),
        None,
        44,
    ),
}


@pytest.mark.parametrize(("request_", "first_step", "wanted"), CASES.values(), ids=list(CASES))
def test_tokens_known_to_be_computed(
    request_: FakeRequest, first_step: FirstStep | None, wanted: int
) -> None:
    assert num_certain_tokens(request_, first_step) == wanted


CHUNK, BLOCK = 8, 4
IDENTITY = KVIdentity("model", "float32", CHUNK)
TABLE = [*range(20)]


class Client:
    """Accepts all saves or none; the test says when they are copied."""

    def __init__(self) -> None:
        self.refuses = False
        self.saves: dict[str, SaveRequest] = {}
        self.judged: list[tuple[int, int, bool]] = []

    def save(self, save: SaveRequest) -> bool:
        if not self.refuses:
            self.saves[save.save_id] = save
        return not self.refuses

    def end_save(self, save_id: str, *, is_unchanged: bool) -> None:
        save = self.saves.pop(save_id)
        self.judged.append((save.first_chunk, len(save.keys), is_unchanged))


class Saves:
    """The saves of a request of 40 tokens, among others; steps of 16 tokens."""

    def __init__(self) -> None:
        self.client = Client()
        self.reported: list[str] = []
        self.publishes_tokens: Callable[[], bool] = lambda: False
        self.saves = PoolSaves(
            self.client,
            1,
            WindowBlocks([KVGroup((0,))], CHUNK, BLOCK),
            publishes_tokens=lambda: self.publishes_tokens(),
            report=self.reported.append,
        )
        self.request = FakeRequest("a", PROMPT)
        self.saves.add(self.request, IDENTITY)

    def begin(self, num_initial_tokens: int = 0) -> None:
        self.step(
            new=[
                SimpleNamespace(
                    req_id="a", block_ids=(TABLE,), num_computed_tokens=num_initial_tokens
                )
            ]
        )

    def step(self, new: Sequence[Any] = ()) -> None:
        cached = SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        )
        step = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={each.req_id: 16 for each in new},
        )
        self.saves.process_step(step)

    def compute(self, num_tokens: int) -> None:
        """Complete a step that computes this many tokens; the next one is scheduled."""
        self.request.num_computed_tokens = num_tokens
        self.step()

    def copy_all(self) -> None:
        for save_id in list(self.client.saves):
            self.saves.copied(ChunksCopied(save_id))

    def end(self, status: str = "FINISHED_LENGTH_CAPPED") -> bool:
        self.request.status = SimpleNamespace(name=status)
        return self.saves.end(self.request, (TABLE,))


def test_prompt_is_saved_while_computed_and_answer_at_the_end() -> None:
    it = Saves()
    it.begin()
    assert not it.client.saves
    it.compute(16)
    it.compute(32)
    it.request.output_token_ids = [7] * 9
    it.compute(41)
    it.copy_all()
    assert it.client.judged == [(0, 2, True), (2, 4, True), (4, 5, True)]
    it.request.num_computed_tokens = 48
    assert it.end()
    assert it.saves.is_holding
    it.copy_all()
    assert it.client.judged[3:] == [(5, 6, True)]
    assert it.reported == ["a"]
    assert not it.saves.is_holding


def next_turn(it: Saves) -> None:
    """A session continues after 40 tokens of prompt and 8 of answer: the client's new text replaces
    the last one."""
    it.begin()
    it.request.output_token_ids = [7] * 8
    it.compute(40)
    it.copy_all()
    it.request.prompt_token_ids = [*PROMPT, *[7] * 7, *range(50, 59)]
    it.request.output_token_ids = []
    it.request.num_computed_tokens = 47


def test_next_turn_of_session_is_saved_under_its_own_keys() -> None:
    """Without the chunks of the turns before, which the store has."""
    it = Saves()
    next_turn(it)
    it.begin(num_initial_tokens=47)
    it.compute(56)
    [save] = it.client.saves.values()
    assert save.first_chunk == 5
    assert save.keys == chunk_keys(IDENTITY, it.request.prompt_token_ids[:48])


def test_turn_of_session_is_saved_up_to_its_first_picture() -> None:
    """So is what the last step of the turn before computed, which ended when the client went on."""
    it = Saves()
    it.begin()
    it.compute(16)
    it.copy_all()
    it.request.num_computed_tokens = 24
    it.request.mm_features = [picture(39), picture(34)]
    it.begin(num_initial_tokens=24)
    it.compute(40)
    it.request.output_token_ids = [7]
    assert it.end()
    it.copy_all()
    assert it.client.judged == [(0, 2, True), (2, 3, True), (3, 4, True)]


def test_request_with_an_adapter_is_not_saved() -> None:
    it = Saves()
    it.request.lora_request = "an adapter"
    it.begin()
    it.compute(40)
    assert not it.client.saves
    it.request.output_token_ids = [7]
    assert not it.end()


def test_next_turn_of_session_offers_refused_chunks_again() -> None:
    it = Saves()
    it.begin()
    it.compute(16)
    [first] = it.client.saves
    it.saves.copied(ChunksCopied(first, refused_chunk=1))
    it.compute(32)
    assert not it.client.saves
    it.begin(num_initial_tokens=32)
    it.compute(40)
    it.copy_all()
    assert it.client.judged == [(0, 2, True), (1, 4, True)]


def test_stored_chunks_are_not_saved_again() -> None:
    it = Saves()
    it.saves.note_known("a", 2)
    it.begin(num_initial_tokens=16)
    it.compute(32)
    it.copy_all()
    assert it.client.judged == [(2, 4, True)]


def test_blocks_are_held_at_the_end_until_earlier_saves_are_copied() -> None:
    it = Saves()
    it.begin()
    it.compute(32)
    it.request.output_token_ids = [7]
    it.request.num_computed_tokens = 40
    it.compute(40)
    assert it.end()
    it.copy_all()
    assert all(is_unchanged for _, _, is_unchanged in it.client.judged)
    assert it.reported == ["a"]


def test_no_blocks_are_held_once_everything_is_copied() -> None:
    it = Saves()
    it.begin()
    it.request.output_token_ids = [7]
    it.compute(40)
    it.copy_all()
    assert not it.end()
    assert it.reported == []


def test_copies_of_a_preempted_request_are_discarded_and_saved_again() -> None:
    it = Saves()
    it.begin()
    it.compute(16)
    it.request.num_preemptions, it.request.num_computed_tokens = 1, 0
    it.copy_all()
    assert it.client.judged == [(0, 2, False)]
    it.begin()
    it.compute(16)
    it.copy_all()
    assert it.client.judged[1:] == [(0, 2, True)]


@pytest.mark.parametrize("ending", ["error", "reset"])
def test_copies_with_other_weights_or_tokens_are_discarded(ending: str) -> None:
    it = Saves()
    it.begin()
    it.compute(16)
    if ending == "reset":
        it.saves.forget()
    else:
        assert not it.end("FINISHED_ERROR")
    it.copy_all()
    assert it.client.judged == [(0, 2, False)]
    assert it.reported == []
    assert not it.saves.num_in_flight


def test_rejected_saves_are_retried_at_the_end() -> None:
    it = Saves()
    it.begin()
    it.client.refuses = True
    it.compute(16)
    it.compute(32)
    it.client.refuses = False
    it.request.output_token_ids = [7]
    it.request.num_computed_tokens = 40
    assert it.end()
    it.copy_all()
    assert it.client.judged == [(0, 5, True)]
    assert it.reported == ["a"]


def test_chunks_without_memory_are_offered_again_at_the_end() -> None:
    """The store has memory for the first of two chunks only; the rest follows at the end."""
    it = Saves()
    it.begin()
    it.compute(16)
    [first] = it.client.saves
    it.saves.copied(ChunksCopied(first, refused_chunk=1))
    assert it.client.judged == [(0, 2, True)]
    it.compute(32)
    assert not it.client.saves, "a full store is not asked in every step"
    it.request.output_token_ids = [7]
    it.request.num_computed_tokens = 40
    assert it.end()
    it.copy_all()
    assert it.client.judged[1:] == [(1, 5, True)]
    assert it.reported == ["a"]


def test_store_may_refuse_before_the_offer_returns() -> None:
    """The client's thread completes before vLLM's continues."""
    it = Saves()
    it.begin()
    give = it.client.save

    def save(save: SaveRequest) -> bool:
        give(save)
        it.saves.copied(ChunksCopied(save.save_id, False, 0))
        del it.client.saves[save.save_id]
        return True

    it.client.save = save  # type: ignore[method-assign]
    it.compute(16)
    it.client.save = give  # type: ignore[method-assign]
    it.request.output_token_ids = [7]
    it.compute(40)
    assert it.end()
    it.copy_all()
    assert it.client.judged == [(0, 5, True)]


def test_refusal_while_the_next_chunks_are_offered_is_kept() -> None:
    """The client's thread completes while vLLM's collects the tokens and keys of its next save."""
    it = Saves()
    it.begin()
    it.compute(16)
    [early] = it.client.saves

    def publishes_tokens() -> bool:
        it.publishes_tokens = lambda: False
        it.saves.copied(ChunksCopied(early, False, 1))
        del it.client.saves[early]
        return False

    it.publishes_tokens = publishes_tokens
    it.compute(32)
    it.copy_all()
    it.request.output_token_ids = [7]
    it.request.num_computed_tokens = 40
    assert it.end()
    it.copy_all()
    assert it.client.judged == [(2, 4, True), (1, 5, True)]


def test_refusal_of_a_preempted_request_changes_nothing() -> None:
    it = Saves()
    it.begin()
    it.compute(16)
    [early] = it.client.saves
    it.request.num_preemptions, it.request.num_computed_tokens = 1, 0
    it.begin()
    it.compute(16)
    it.saves.copied(ChunksCopied(early, False, 0))
    del it.client.saves[early]
    it.compute(32)
    it.copy_all()
    assert it.client.judged == [(0, 2, True), (2, 4, True)]


def test_copy_completed_during_further_saves_frees_no_blocks() -> None:
    """The client's thread completes before vLLM's continues."""
    it = Saves()
    it.begin()
    it.compute(16)
    [early] = it.client.saves
    give = it.client.save

    def save(save: SaveRequest) -> bool:
        it.saves.copied(ChunksCopied(early))
        return give(save)

    it.client.save = save  # type: ignore[method-assign]
    it.request.output_token_ids = [7]
    it.request.num_computed_tokens = 40
    assert it.end()
    assert it.reported == []
    it.copy_all()
    assert it.client.judged == [(0, 2, True), (2, 5, True)]
    assert it.reported == ["a"]
