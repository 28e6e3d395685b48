"""vLLM's real Scheduler and AsyncScheduler over the pool's connector, with random orders of events.

Two instances share one store, which is small enough to evict chunks. In any order of events, no
step reads KV of other tokens, every request finishes, and all blocks are free at the end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.vllm_caches import make_caches
from support.vllm_scheduler import (
    BLOCK_SIZE,
    KV,
    PAUSE_S,
    VllmInstance,
    answer_to,
    children,
    engine_config,
    settle,
    vllm_instance,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.sched.interface import PauseState

from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.pool.pool_events import PoolLoadEnded
from mooncake_kv.store.chunk_keys import chunk_keys
from mooncake_kv.store.chunk_layout import chunk_bytes
from mooncake_kv.store.chunk_store import Residence
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.store_service import StoreAddress, StoreService
from mooncake_vllm.vllm_pool_side import PoolSchedulerSide

NUM_EXAMPLES = int(os.environ.get("VLLM_EXAMPLES", "15"))
NUM_BLOCKS = 24
NUM_ROOMY_BLOCKS = 64
"""So many that a whole prompt's blocks of windows may be held."""
CHUNK = 2 * BLOCK_SIZE
STEM = [*range(7, 31)]
PROMPTS = [STEM[:5], STEM[:8], STEM[:9], STEM, [*STEM, *range(50, 60)], [*range(60, 90)]]
WINDOWS = [CHUNK - 3, CHUNK, CHUNK + 2, 3 * CHUNK]
"""Sliding windows: in as many blocks as a chunk, as long as one, no multiple of a block, longer."""
SAVED_S = 30.0
MAX_TOLD = 50
MANY, FEW = 64, 4
"""Capacity of the store in chunks."""

place = st.sampled_from([0, 1])
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(PROMPTS) - 1), place),
    st.tuples(st.just("ask"), st.integers(0, len(PROMPTS) - 1), place),
    st.tuples(st.just("steps"), st.integers(1, 8), place),
    st.tuples(st.just("steps"), st.integers(1, 8), place),
    st.tuples(st.just("abort"), st.integers(0, 20), place),
    st.tuples(st.just("settle"), st.just(0), place),
    st.tuples(st.just("forget"), st.just(0), place),
    st.tuples(st.just("preempt"), st.integers(0, 3), place),
    st.tuples(st.just("turn"), st.integers(0, len(PROMPTS) - 1), place),
    st.tuples(st.just("lose"), st.integers(0, 20), place),
)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[StoreService]:
    """A store in this process that accepts connections."""
    geometry = make_caches(KV, "LBHNC", 2, BLOCK_SIZE).view.geometry
    nbytes = max(4096, chunk_bytes(geometry, CHUNK)) * request.param
    node = NodeStore(NodeStoreConfig(nbytes, quarantine_s=0.2))
    transports = Transports.open(
        Registry.discover(), EndpointOptions(), wanted="tcp", allowed=["tcp"]
    )
    service = StoreService.start(node, transports, StoreAddress("127.0.0.1", 0))
    yield service
    service.close()
    transports.close()
    node.close()


class Pair:
    """Two instances, and the requests sent to them."""

    def __init__(self, instances: tuple[VllmInstance, VllmInstance]) -> None:
        self.instances = instances
        self.asked: list[tuple[int, str, list[int]]] = []
        self.sessions: dict[int, tuple[str, list[int], list[int]]] = {}

    def do(self, what: str, number: int, at: int) -> None:
        instance = self.instances[at]
        if what in ("preempt", "turn", "lose"):
            getattr(self, what)(number, instance, at)
        elif what == "ask":
            name = f"r{len(self.asked)}"
            self.asked.append((at, name, answer_to(PROMPTS[number], 9)))
            instance.submit(name, PROMPTS[number], 9)
        elif what == "steps":
            for _ in range(number):
                instance.step()
        elif what == "abort":
            mine = [name for where, name, _ in self.asked if where == at]
            if mine:
                instance.abort(mine[number % len(mine)])
        elif what == "settle":
            settle([instance], 30)
        else:  # resets vLLM's own cache, so that only the pool still holds the KV
            settle([instance], 30)
            if at in self.sessions:  # which holds its blocks for the next turn
                instance.abort(self.sessions[at][0])
                settle([instance], 30)
            assert instance.scheduler.reset_prefix_cache()

    def preempt(self, number: int, instance: VllmInstance, _: int) -> None:
        """All running requests are preempted, before new weights if the number is 0."""
        instance.drain()
        with suppress(RuntimeError):  # vLLM can't free the blocks of loads and sessions
            instance.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=not number
            )

    def lose(self, number: int, instance: VllmInstance, _: int) -> None:
        """The store loses a prompt's chunks, from one of the first three on."""
        side = instance.scheduler.connector._scheduler
        [user] = side._client._stores.all
        keys = chunk_keys(side._identity, PROMPTS[number % len(PROMPTS)])
        user.drop(keys[number % 3 :]).result(SAVED_S)

    def turn(self, number: int, instance: VllmInstance, at: int) -> None:
        """The next turn of an instance's session, whose last one may still be computed."""
        name, told, wanted = self.sessions.get(at, ("", [], []))
        if not name or instance.answers[name].finish == "abort" or len(told) > MAX_TOLD:
            if name:
                instance.abort(name)
            name, told, wanted = f"s{len(self.asked)}", [], []
            self.asked.append((at, name, wanted))
            self.sessions[at] = name, told, wanted
        told[-1:] = PROMPTS[number]
        instance.submit(name, PROMPTS[number], 6, is_session=True)
        answer = answer_to(told, 6)
        told += answer
        wanted += answer

    def check(self) -> None:
        settle(self.instances, 30)
        for at, (name, _, wanted) in self.sessions.items():
            answer = self.instances[at].answers[name]
            assert answer.finish == "abort" or answer.tokens == wanted
            self.instances[at].abort(name)
        settle(self.instances, 30)
        for at, name, wanted in self.asked:
            answer = self.instances[at].answers[name]
            assert answer.finish in ("length", "abort"), name
            assert answer.tokens == wanted[: len(answer.tokens)], name
            assert answer.finish == "abort" or len(answer.tokens) == len(wanted), name
        for each in self.instances:
            assert each.num_free == each.num_blocks - 1
            assert each.figures()["hook_errors"] == each.figures()["pool_saves_in_flight"] == 0
            assert each.leftovers() == []


def pooled(
    store: StoreService,
    *,
    is_async: bool,
    is_behind: bool = False,
    windows: tuple[int, int] = (0, 0),
    is_hybrid: bool = True,
    num_blocks: int = NUM_BLOCKS,
) -> AbstractContextManager[VllmInstance]:
    """An instance that uses this store."""
    pool = f"connect=127.0.0.1:{store.port},chunk={CHUNK}"
    config = engine_config(
        *("kv_both", "HalPoolConnector", "recompute"),
        is_async=is_async,
        pool=pool,
        is_hybrid=is_hybrid,
    )
    return vllm_instance(config, num_blocks, windows, is_behind=is_behind)


def wait_for_saved(instance: VllmInstance, wanted: int) -> None:
    """Wait until the store has saved this many chunks, which it does after vLLM freed the blocks.

    Raises:
        AssertionError: The store has another number of chunks after ``SAVED_S``.
    """
    deadline = time.monotonic() + SAVED_S
    while (saved := instance.figures()["pool_num_saved_chunks"]) != wanted:
        assert time.monotonic() < deadline, f"{saved:g} chunks are saved, wanted {wanted}"
        time.sleep(0.01)


def has_answered(instance: VllmInstance, name: str, num_tokens: int) -> bool:
    """Whether a request has so many tokens of its answer."""
    return len(instance.answers[name].tokens) >= num_tokens


def step_until(instance: VllmInstance, is_over: Callable[[], bool]) -> None:
    """Step an instance until something has happened.

    Raises:
        AssertionError: it has not after ``SAVED_S``.
    """
    deadline = time.monotonic() + SAVED_S
    while not is_over():
        assert time.monotonic() < deadline
        instance.step()
        time.sleep(PAUSE_S)


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("windows", [(0, 0), *((each, 0) for each in WINDOWS), (CHUNK, CHUNK)])
@pytest.mark.parametrize("are_hybrid", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_instance_loads_kv_computed_by_another(
    store: StoreService, is_async: bool, windows: tuple[int, int], are_hybrid: tuple[bool, bool]
) -> None:
    """With vLLM's hybrid manager, blocks that have left the window are freed; without it, vLLM
    keeps them, unless all layers have the same window. Chunks are the same."""
    options: dict[str, Any] = {
        "is_async": is_async,
        "windows": windows,
        "num_blocks": NUM_ROOMY_BLOCKS,
    }
    with (
        pooled(store, **options, is_hybrid=are_hybrid[0]) as first,
        pooled(store, **options, is_hybrid=are_hybrid[1]) as second,
    ):
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(first, (len(PROMPTS[4]) + 8) // CHUNK)
        pair.do("ask", 4, 1)
        pair.check()
        assert second.figures()["pool_num_loaded_chunks"] == (len(PROMPTS[4]) - 1) // CHUNK
        assert second.figures()["pool_num_failed_loads"] == 0


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_prompt_whose_log_probabilities_are_wanted_is_not_loaded(store: StoreService) -> None:
    """Newer releases of vLLM ignore what a connector finds for it, 0.30 does not."""
    with pooled(store, is_async=False) as instance:
        pair = Pair((instance, instance))
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(instance, (len(PROMPTS[4]) + 8) // CHUNK)
        num_lookups = instance.figures()["pool_num_lookups"]
        instance.submit("r", PROMPTS[4], 8, num_prompt_logprobs=1)
        [request] = instance.scheduler.requests.values()
        assert instance.scheduler.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        settle([instance], 30)
        assert instance.figures()["pool_num_lookups"] == num_lookups
        assert instance.leftovers() == []


@pytest.mark.parametrize(
    ("connector", "role", "is_dropped"),
    [
        ("HalPoolConnector", "kv_both", False),
        ("HalPullConnector", "kv_consumer", False),
        ("HalPullConnector", "kv_producer", True),
    ],
    ids=["pool", "pool beside D's", "pool beside P's"],
)
def test_preemption_drops_output_in_flight_only_if_a_peer_waits_for_kv(
    connector: str, role: str, is_dropped: bool
) -> None:
    """vLLM delivers it otherwise, and needs no steps to compute it again."""
    config = engine_config(
        role, connector, "recompute", is_async=True, pool=f"dram=1MiB,chunk={CHUNK}"
    )
    with vllm_instance(config, NUM_BLOCKS) as instance:
        assert instance.scheduler.requires_kv_delivery is is_dropped


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("is_behind", [False, True], ids=["runs at once", "runs later"])
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("num_answered", [0, 7])
def test_computed_kv_is_saved_after_client_disconnect(
    store: StoreService, is_async: bool, is_behind: bool, num_answered: int
) -> None:
    prompt = PROMPTS[4]
    with (
        pooled(store, is_async=is_async, is_behind=is_behind) as first,
        pooled(store, is_async=is_async) as second,
    ):
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        [request] = first.scheduler.requests.values()
        for _ in range(40):
            num_computed = request.num_computed_tokens - request.num_in_flight_tokens
            if num_computed and len(request.output_token_ids) >= num_answered:
                break
            pair.do("steps", 1, 0)
            time.sleep(0.01)  # the time in which the store reports a miss
        assert len(request.output_token_ids) == num_answered
        assert num_computed == (len(prompt) + num_answered - 1 if num_answered else 16)
        first.abort(request.request_id)
        wait_for_saved(first, num_computed // CHUNK)
        pair.do("ask", 4, 1)
        pair.check()
        loaded = min(num_computed, len(prompt) - 1) // CHUNK
        assert second.figures()["pool_num_loaded_chunks"] == loaded


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_step_does_not_wait_once_store_has_responded(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pooled(store, is_async=False) as instance:
        [worker] = instance._sides
        [asked] = instance.scheduler.connector._scheduler._client._stores.all
        probe_now = asked.probe

        def probe(keys: Sequence[bytes]) -> Future[list[Residence]]:
            """As with a store on another host, whose answer is never there at once."""
            found: Future[list[Residence]] = Future()
            answer = threading.Timer(0.1, lambda: found.set_result(probe_now(keys).result()))
            answer.start()
            return found

        monkeypatch.setattr(asked, "probe", probe)
        worker.begin_step((), wait_s=SAVED_S)
        step = threading.Thread(target=worker.take_results)
        step.start()
        instance.submit("r", PROMPTS[4], 1)
        step.join(SAVED_S / 2)
        assert not step.is_alive()
        settle([instance], 30)


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_look_up_that_is_not_answered_in_time_finds_nothing(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_vllm.vllm_pool_side.LOOK_UP_TIMEOUT_S", 0.2)
    with pooled(store, is_async=False) as instance:
        [asked] = instance.scheduler.connector._scheduler._client._stores.all
        answer: Future[list[Residence]] = Future()
        monkeypatch.setattr(asked, "probe", lambda keys: answer)
        instance.submit("r", PROMPTS[4], 8)
        settle([instance], 30)
        assert instance.answers["r"].tokens == answer_to(PROMPTS[4], 8)
        answer.set_result([Residence.ABSENT] * (len(PROMPTS[4]) // CHUNK))


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_kv_from_before_reset_is_not_loaded_or_saved_under_new_weights(
    store: StoreService,
) -> None:
    """vLLM resets all caches before it loads other weights; another instance keeps its own."""
    whole = (len(PROMPTS[4]) + 8) // CHUNK
    with pooled(store, is_async=False) as first, pooled(store, is_async=False) as second:
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(first, whole)
        pair.do("ask", 4, 0)
        pair.do("steps", 2, 0)
        assert first.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        pair.do("settle", 0, 0)
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(first, 2 * whole)
        assert first.figures()["pool_num_loaded_chunks"] == 0
        pair.do("ask", 4, 1)
        pair.check()
        assert first.figures()["pool_num_saved_chunks"] == 2 * whole
        assert second.figures()["pool_num_loaded_chunks"] == (len(PROMPTS[4]) - 1) // CHUNK


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_prompt_is_found_while_its_answer_is_saved(store: StoreService, is_async: bool) -> None:
    with pooled(store, is_async=is_async) as first, pooled(store, is_async=is_async) as second:
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        pair.do("steps", 4, 0)
        wait_for_saved(first, len(PROMPTS[4]) // CHUNK)
        assert not first.answers["r0"].finish
        pair.do("ask", 4, 1)
        pair.check()
        assert second.figures()["pool_num_loaded_chunks"] == (len(PROMPTS[4]) - 1) // CHUNK


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("windows", [(0, 0), *((each, 0) for each in WINDOWS), (CHUNK, CHUNK)])
@pytest.mark.parametrize("is_behind", [False, True], ids=["runs at once", "runs later"])
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_all_turns_of_a_session_are_saved(
    store: StoreService, is_async: bool, is_behind: bool, windows: tuple[int, int]
) -> None:
    """The client's next text, which replaces the last token of the answer so far, comes after the
    answer, or while it is computed."""
    # All blocks of the windows may be held, however late the copies are.
    options: dict[str, Any] = {"windows": windows, "num_blocks": 3 * NUM_ROOMY_BLOCKS}
    turns, num_tokens = [PROMPTS[3], PROMPTS[5], STEM[:3], PROMPTS[4]], 6
    with (
        pooled(store, is_async=is_async, is_behind=is_behind, **options) as first,
        pooled(store, is_async=is_async, **options) as second,
    ):
        told: list[int] = []
        wanted: list[int] = []
        for number, turn in enumerate(turns):
            first.submit("r", turn, num_tokens, is_session=True)
            told = [*told[:-1], *turn]
            wanted += answer_to(told, num_tokens)
            told += wanted[-num_tokens:]
            if number != 1:
                step_until(first, partial(has_answered, first, "r", len(wanted)))
                assert first.answers["r"].tokens == wanted
                settle([first], 30)  # a session that waits for its client needs no steps
        first.abort("r")
        settle([first], 30)
        wait_for_saved(first, (len(told) - 1) // CHUNK)
        assert first.figures()["pool_num_unheld_chunks"] == 0
        second.submit("r", told, 4)
        settle([second], 30)
        assert second.answers["r"].tokens == answer_to(told, 4)
        assert second.figures()["pool_num_loaded_chunks"] == (len(told) - 1) // CHUNK
        for each in (first, second):
            assert each.num_free == each.num_blocks - 1
            assert each.figures()["hook_errors"] == 0
            assert each.leftovers() == []


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("windows", [(0, 0), (CHUNK, 0)])
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_prompts_are_saved_and_loaded_up_to_their_first_picture(
    store: StoreService, is_async: bool, windows: tuple[int, int]
) -> None:
    """The turn with the picture comes at once after the last step of the turn before it."""
    options: dict[str, Any] = {"windows": windows, "num_blocks": 3 * NUM_ROOMY_BLOCKS}
    with (
        pooled(store, is_async=is_async, **options) as first,
        pooled(store, is_async=is_async, **options) as second,
    ):
        num_tokens = 2 * CHUNK - len(PROMPTS[3]) % CHUNK + 1
        first.submit("r", PROMPTS[3], num_tokens, is_session=True)
        first.submit("r", STEM[:3], 1, is_session=True, picture_at=1)
        told = [*PROMPTS[3], *answer_to(PROMPTS[3], num_tokens)[:-1], *STEM[:3]]
        num_chunks = (len(told) - 2) // CHUNK
        assert num_chunks > len(PROMPTS[3]) // CHUNK
        step_until(first, lambda: first.figures()["pool_num_saved_chunks"] == num_chunks)
        first.abort("r")
        settle([first], 30)
        second.submit("r", told, 4, picture_at=len(told) - 2)
        step_until(second, lambda: second.figures()["pool_num_loaded_chunks"] == num_chunks)
        second.abort("r")
        settle([second], 30)
        for each in (first, second):
            assert each.num_free == each.num_blocks - 1
            assert each.figures()["hook_errors"] == 0
            assert each.leftovers() == []


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_preempted_request_loads_its_saved_kv(store: StoreService) -> None:
    with pooled(store, is_async=False) as instance:
        pair = Pair((instance, instance))
        pair.do("ask", 4, 0)
        pair.do("steps", 4, 0)
        wait_for_saved(instance, len(PROMPTS[4]) // CHUNK)
        assert instance.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.check()
        assert instance.figures()["pool_num_loaded_chunks"] == len(PROMPTS[4]) // CHUNK
        assert not instance.hits, "vLLM counts those of requests that were not preempted"
        pair.do("forget", 0, 0)
        pair.do("ask", 4, 0)
        pair.check()
        assert instance.hits == {"host": (len(PROMPTS[4]) - 1) // CHUNK * CHUNK}


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_chunks_evicted_before_preemption_are_saved_again(store: StoreService) -> None:
    with pooled(store, is_async=False) as first, pooled(store, is_async=False) as second:
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(first, (len(PROMPTS[4]) + 8) // CHUNK)
        pair.do("forget", 0, 0)
        pair.do("ask", 4, 0)
        step_until(first, partial(has_answered, first, "r1", 1))
        side = first.scheduler.connector._scheduler
        assert side.stats()["pool_num_loaded_chunks"] == len(PROMPTS[4]) // CHUNK
        [user] = side._client._stores.all
        user.drop(side._saves.first_keys("r1", len(PROMPTS[4]) // CHUNK)).result(SAVED_S)
        assert first.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.do("settle", 0, 0)
        pair.do("ask", 4, 1)
        pair.check()
        assert second.figures()["pool_num_loaded_chunks"] == len(PROMPTS[4]) // CHUNK


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_pause_is_complete_once_no_blocks_are_held(store: StoreService, is_async: bool) -> None:
    """When no request has work left, vLLM completes the pause, and clears its caches."""
    options: dict[str, Any] = {"windows": (CHUNK + 2, 0), "num_blocks": NUM_ROOMY_BLOCKS}
    with pooled(store, is_async=is_async, **options) as instance:
        pair = Pair((instance, instance))
        pair.do("ask", 4, 0)
        side = instance.scheduler.connector._scheduler
        step_until(instance, lambda: side._windows.num_held > 0)
        instance.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        instance.drain()
        settle([instance], 30)
        assert instance.scheduler.reset_prefix_cache(reset_running_requests=True)
        instance.scheduler.set_pause_state(PauseState.UNPAUSED)
        pair.check()


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("connector", ["HalPoolConnector", "HalPullConnector"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("windows", [(0, 0), (CHUNK + 2, 0)], ids=["full", "sliding"])
def test_error_for_lost_chunk_names_the_load_failure_policy(
    store: StoreService,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    connector: str,
    policy: str,
    windows: tuple[int, int],
) -> None:
    """The policy is vLLM's own or MultiConnector's; the default of the latter's child is to
    fail."""
    pool = f"connect=127.0.0.1:{store.port},chunk={CHUNK}"
    config = engine_config("kv_both", connector, policy, is_async=False, pool=pool)
    with (
        pooled(store, is_async=False, windows=windows, num_blocks=NUM_ROOMY_BLOCKS) as first,
        vllm_instance(config, NUM_ROOMY_BLOCKS, windows) as second,
        caplog.at_level("WARNING", "mooncake_vllm.vllm_pool_side"),
    ):
        first.submit("r", PROMPTS[4], 8)
        settle([first], 30)
        wait_for_saved(first, (len(PROMPTS[4]) + 7) // CHUNK)
        [side] = [
            each._scheduler
            for each in children(second.scheduler.connector)
            if isinstance(each._scheduler, PoolSchedulerSide)
        ]
        monkeypatch.setattr(
            side._client,
            "start_load",
            lambda load: side._on_event(PoolLoadEnded(load.load_id, 0, "it is gone")),
        )
        logging.getLogger("mooncake_vllm").addHandler(caplog.handler)
        try:
            for number in range(2):
                second.submit(f"r{number}", PROMPTS[4], 4)
                settle([second], 30)
        finally:
            logging.getLogger("mooncake_vllm").removeHandler(caplog.handler)
        assert second.answers["r1"].finish == {"fail": "error", "recompute": "length"}[policy]
        assert caplog.text.count("r0 was answered with an error") == (policy == "fail")
        assert "r1 was answered" not in caplog.text


@pytest.mark.parametrize("store", [MANY], indirect=True)
def test_prompt_beyond_the_memory_of_its_store_is_loaded_as_far_as_it_fits(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM was promised all chunks that stores have, and failed every request with that prompt."""
    with pooled(store, is_async=False) as first, pooled(store, is_async=False) as second:
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(first, (len(PROMPTS[4]) + 8) // CHUNK)
        [side] = [each._scheduler for each in children(second.scheduler.connector)]
        [user] = side._client._stores.all
        monkeypatch.setattr(side._client, "chunk_bytes", user.arena.nbytes // 2)
        pair.do("ask", 4, 1)
        settle([second], 30)
        assert second.answers["r1"].tokens == answer_to(PROMPTS[4], 9)
        assert second.figures()["pool_num_failed_loads"] == 0
        assert second.figures()["pool_num_loaded_chunks"] == 2


@pytest.mark.parametrize("store", [MANY], indirect=True)
@pytest.mark.parametrize("call", ["lookup", "start_load"])
def test_load_that_can_not_be_started_is_recomputed(
    store: StoreService, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """vLLM waits for the look-up, and has put the request aside until its load has ended."""

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    with pooled(store, is_async=False) as first, pooled(store, is_async=False) as second:
        pair = Pair((first, second))
        pair.do("ask", 4, 0)
        pair.do("settle", 0, 0)
        wait_for_saved(first, (len(PROMPTS[4]) + 8) // CHUNK)
        [side] = [each._scheduler for each in children(second.scheduler.connector)]
        monkeypatch.setattr(side._client, call, fail)
        pair.do("ask", 4, 1)
        settle([second], 30)
        assert second.answers["r1"].tokens == answer_to(PROMPTS[4], 9)
        assert second.figures()["hook_errors"] == 1
        assert second.leftovers() == []


@pytest.mark.parametrize("has_new_weights", [False, True], ids=["its own cache", "all of it"])
def test_cache_reset_event_removes_no_store_chunk_for_subscribers(
    has_new_weights: bool,
) -> None:
    config = engine_config(
        "kv_both", "HalPoolConnector", "recompute", is_async=False, has_events=True,
        pool=f"dram=1MiB,chunk={CHUNK}",
    )  # fmt: skip
    whole = (len(PROMPTS[4]) + 8) // CHUNK
    with vllm_instance(config, NUM_BLOCKS) as instance:
        published: list[Any] = []
        instance.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        instance.submit("first", PROMPTS[4], 8)
        settle([instance], 30)
        wait_for_saved(instance, whole)
        instance.submit("second", PROMPTS[0], 1)
        settle([instance], 30)
        chunks = in_store(published)
        assert len(chunks) == whole
        published.clear()
        assert instance.scheduler.reset_prefix_cache(reset_connector=has_new_weights)
        instance.submit("third", PROMPTS[0], 1)
        settle([instance], 30)
        assert isinstance(published[0], AllBlocksCleared)
        assert in_store(published) == (set() if has_new_weights else chunks)


def in_store(events: list[Any]) -> set[int]:
    """The store's chunks among the published blocks."""
    stored = [each for each in events if isinstance(each, BlockStored) and each.medium == "CPU"]
    return {name for each in stored for name in each.block_hashes}


@pytest.mark.parametrize("store", [MANY, FEW], indirect=True, ids=["roomy", "tight"])
@pytest.mark.parametrize(
    "windows", [(0, 0), (CHUNK - 3, 0), (CHUNK + 2, CHUNK + 2)], ids=["full", "some", "same"]
)
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_any_order_of_events(store: StoreService, is_async: bool, windows: tuple[int, int]) -> None:
    """With groups, vLLM itself needs more blocks: it waits for ever if loads take so many that none
    of their requests can run."""
    roomy, scarce = (NUM_ROOMY_BLOCKS, 2 * NUM_BLOCKS) if windows[0] else (NUM_BLOCKS, NUM_BLOCKS)

    @given(st.lists(EVENTS, min_size=4, max_size=40), st.booleans())
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize="VLLM_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    def run(events: list[tuple[str, int, int]], is_behind: bool) -> None:
        options: dict[str, Any] = {
            "is_async": is_async,
            "windows": windows,
            "is_behind": is_behind,
        }
        with (
            pooled(store, **options, num_blocks=roomy) as first,
            pooled(store, **options, num_blocks=scarce) as second,
        ):
            pair = Pair((first, second))
            for event in events:
                pair.do(*event)
            pair.check()

    run()
