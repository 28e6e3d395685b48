"""vLLM's real Scheduler and AsyncScheduler over the connector, with random orders of events.

P and D are real schedulers with both halves of the connector, over real sockets. In any order of
events, no step reads another prompt's KV, every request finishes, all blocks are free at the end,
and no hook has failed.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.metaserver import Metaserver
from support.vllm_scheduler import (
    BLOCK_SIZE,
    PAUSE_S,
    VllmInstance,
    answer_to,
    children,
    engine_config,
    settle,
    vllm_instance,
)

from mooncake_kv.pool.pool_events import LoadRequest, PoolLoadEnded
from mooncake_vllm.vllm_pool_side import PoolSchedulerSide

NUM_EXAMPLES = int(os.environ.get("VLLM_EXAMPLES", "15"))
NUM_BLOCKS = 30  # three long prompts with their answers force vLLM to preempt
SETTLED_S = 60.0
POOL = "dram=1MiB,chunk=8"
SHARED = [5, 11, 2, 9, 30, 8, 17, 4, 6, 12, 90, 3, 44]
PROMPTS = [
    [7],
    [1, 2, 3, 4],
    SHARED,
    [*SHARED[:8], 70],
    [*SHARED, *range(40)],
    [*range(33, 60)],
    SHARED[:8],
]
CHANGES: list[dict[str, Any]] = [
    {"prompt_digest": "another"},
    {"remote_request_id": "nobody"},
    {"remote_block_ids": [[2**30]]},
    {"remote_port": "x"},
    {"remote_engine_id": "nobody"},
]

index = st.integers(0, 20)
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 5)),
    st.tuples(st.just("ask"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 5)),
    st.tuples(st.just("forward"), index, st.integers(1, 2)),
    st.tuples(st.just("forward"), index, st.integers(1, 2)),
    st.tuples(st.just("continue"), index, st.just(1)),
    st.tuples(st.just("again"), index, st.just(1)),
    st.tuples(st.just("change"), index, st.integers(0, len(CHANGES) - 1)),
    st.tuples(st.just("refuse"), index, st.just(0)),
    st.tuples(st.just("plain"), st.integers(0, len(PROMPTS) - 1), st.sampled_from([0, 1])),
    st.tuples(st.just("abort"), index, st.sampled_from([0, 1])),
    st.tuples(st.just("steps"), st.integers(1, 6), st.sampled_from([0, 1])),
    st.tuples(st.just("steps"), st.integers(1, 6), st.sampled_from([0, 1])),
    st.tuples(st.just("pause"), st.integers(1, 8), st.just(0)),
)
ORDERS = st.lists(EVENTS, min_size=20, max_size=60)


@dataclass
class TransferredRequest:
    """One request that goes from P to D: its prompt, and P's parameters or D's post once
    available."""

    prompt: list[int]
    num_tokens: int
    params: dict[str, Any] | None = None
    is_forwarded: bool = False


@dataclass
class World:
    """P, D and the proxy's role in front of them.

    Args:
        prefill, decode: the instances.
        metaserver_url: where D posts, in the push flow; empty: pull.
        posts: the posts so far, by request.
    """

    prefill: VllmInstance
    decode: VllmInstance
    metaserver: Metaserver | None
    posts: dict[str, dict[str, Any]]
    asked: dict[str, TransferredRequest] = field(default_factory=dict)
    wanted: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    count: int = 0

    def do(self, what: str, first: int, second: int) -> None:
        getattr(self, f"_{what}")(first, second)

    def finish(self, *, forgets: bool) -> None:
        """Reject or drop the remaining requests: leases and deadlines have to end them."""
        deadline = time.monotonic() + 1.0
        for each in self._both:
            while not forgets and not each.is_idle and time.monotonic() < deadline:
                for one in self._both:
                    one.step()
                time.sleep(0.001)
        for name in [] if forgets else self._ready():
            if self.metaserver is not None:
                self._send(name, 1)
            else:
                self._refuse_one(name)
        settle(self._both, SETTLED_S)

    @property
    def _both(self) -> tuple[VllmInstance, VllmInstance]:
        return self.prefill, self.decode

    def _new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def _submit(
        self, at: int, name: str, prompt: list[int], num_tokens: int, params: Any = None
    ) -> None:
        self.wanted[at, name] = answer_to(prompt, num_tokens)
        self._both[at].submit(name, prompt, num_tokens, params)

    def _ask(self, prompt: int, num_tokens: int) -> None:
        name = self._new("ask")
        self.asked[name] = TransferredRequest(PROMPTS[prompt], num_tokens)
        if self.metaserver is None:
            self._submit(0, name, PROMPTS[prompt], 1, {"do_remote_decode": True})
            self._steps(3, 0)  # otherwise most orders would end before anything can be transferred
        else:
            params = {"do_remote_prefill": True, "metaserver": self.metaserver.url(name)}
            self._submit(1, name, PROMPTS[prompt], num_tokens, params)
            self._steps(3, 1)

    def _ready(self) -> list[str]:
        """The requests that can be forwarded."""
        for name, asked in self.asked.items():
            found = self.prefill.answers[name].params if self.metaserver is None else None
            asked.params = asked.params or found or self.posts.get(name)
        return [name for name, a in self.asked.items() if a.params and not a.is_forwarded]

    def _forward(self, at: int, children: int) -> None:
        if ready := self._ready():
            self._send(ready[at % len(ready)], children)

    def _send(self, name: str, children: int) -> None:
        asked = self.asked[name]
        asked.is_forwarded = True
        if self.metaserver is not None:
            self._submit(0, self._new("p"), asked.prompt, 1, asked.params)
            return
        for _ in range(children):
            self._submit(1, self._new("d"), asked.prompt, asked.num_tokens, asked.params)

    def _continue(self, at: int, _: int) -> None:
        """Continue as a proxy that has sent P's token to its client."""
        ready = self._ready()
        if not ready or self.metaserver is not None:
            return
        asked = self.asked[ready[at % len(ready)]]
        assert asked.params is not None
        asked.is_forwarded = True
        prompt = [*asked.prompt, asked.params["last_token_id"]]
        params = asked.params | {"first_token_delivered": True}
        self._submit(1, self._new("d"), prompt, asked.num_tokens, params)

    def _again(self, at: int, _: int) -> None:
        used = [asked for asked in self.asked.values() if asked.is_forwarded]
        if used and self.metaserver is None:
            asked = used[at % len(used)]
            self._submit(1, self._new("d"), asked.prompt, asked.num_tokens, asked.params)

    def _change(self, at: int, which: int) -> None:
        ready = self._ready()
        if ready and self.metaserver is None:
            asked = self.asked[ready[at % len(ready)]]
            params = (asked.params or {}) | CHANGES[which]
            self._submit(1, self._new("d"), asked.prompt, asked.num_tokens, params)

    def _refuse(self, at: int, _: int) -> None:
        ready = self._ready()
        if ready and self.metaserver is None:
            self._refuse_one(ready[at % len(ready)])

    def _refuse_one(self, name: str) -> None:
        self.asked[name].is_forwarded = True
        refused = self._new("refused")
        self.decode.submit(refused, [], 1, self.asked[name].params, is_refused=True)
        self.wanted[1, refused] = []

    def _plain(self, prompt: int, at: int) -> None:
        self._submit(at, self._new("plain"), PROMPTS[prompt], 6)

    def _abort(self, number: int, at: int) -> None:
        if names := [name for where, name in self.wanted if where == at]:
            self._both[at].abort(names[number % len(names)])

    def _steps(self, count: int, at: int) -> None:
        for _ in range(count):
            self._both[at].step()
            time.sleep(PAUSE_S)  # time for the connector's own threads to work

    def _pause(self, milliseconds: int, _: int) -> None:
        time.sleep(milliseconds / 1000)

    def check(self, *, may_fail: bool) -> None:
        """Check the tokens of all completed requests, and that nothing is left behind."""
        for (at, name), wanted in self.wanted.items():
            answer = self._both[at].answers[name]
            if answer.finish == "length":
                assert answer.tokens == wanted, name
            else:
                assert answer.finish == "abort" or (may_fail and answer.finish == "error"), name
                assert answer.tokens == wanted[: len(answer.tokens)], name
        for each in self._both:
            assert each.num_free == NUM_BLOCKS - 1
            assert not each.scheduler.requests
            figures = each.figures()
            assert figures["hook_errors"] == figures["leases_held"] == 0
            assert each.leftovers() == []


@pytest.fixture(scope="module")
def posts() -> Iterator[tuple[Metaserver, dict[str, dict[str, Any]]]]:
    """A metaserver that stores the posts."""
    kept: dict[str, dict[str, Any]] = {}

    async def keep(key: str, params: dict[str, Any]) -> None:
        kept[key] = params

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = Metaserver(keep)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield server, kept
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_prefill_reports_number_of_cached_tokens(is_async: bool) -> None:
    config = engine_config("kv_producer", "HalPullConnector", "recompute", is_async=is_async)
    found = []
    with vllm_instance(config, NUM_BLOCKS) as prefill:
        for name in ("first", "second"):
            prefill.submit(name, SHARED, 1, {"do_remote_decode": True})
            settle([prefill], SETTLED_S)  # until the lease has expired
            params = prefill.answers[name].params
            assert params is not None
            found.append(params["remote_cached_tokens"])
    assert found == [0, 12]


def run_orders(
    configs: Sequence[Any],
    window: int,
    posts: Any,
    *,
    is_push: bool,
    may_fail: bool,
    is_behind: bool,
) -> None:
    """Run P and D of these configurations through random orders of events."""
    server, kept = posts

    @given(ORDERS, st.booleans())
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize="VLLM_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    def run(events: list[tuple[str, int, int]], forgets: bool) -> None:
        kept.clear()
        with (
            vllm_instance(configs[0], NUM_BLOCKS, (window, 0), is_behind=is_behind) as prefill,
            vllm_instance(configs[1], NUM_BLOCKS, (window, 0), is_behind=is_behind) as decode,
        ):
            world = World(prefill, decode, server if is_push else None, kept)
            for event in events:
                world.do(*event)
            world.finish(forgets=forgets)
            world.check(may_fail=may_fail)

    run()


@pytest.mark.parametrize("is_lost", [False, True], ids=["P has it", "P has lost it"])
def test_kv_of_a_peer_is_loaded_before_stores_have_answered(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the peer's KV is lost, the chunks are loaded which the stores have named meanwhile."""
    monkeypatch.setattr("mooncake_vllm.vllm_pool_side.LOOK_UP_TIMEOUT_S", 10 * SETTLED_S)
    prefill_config, decode_config = (
        engine_config(role, "HalPullConnector", "recompute", is_async=False, pool=pool)
        for role, pool in (("kv_producer", None), ("kv_consumer", POOL))
    )
    prompt, num_chunks = PROMPTS[4], (len(PROMPTS[4]) - 1) // 8
    with (
        vllm_instance(prefill_config, NUM_BLOCKS) as prefill,
        vllm_instance(decode_config, NUM_BLOCKS) as decode,
    ):
        decode.submit("first", prompt, 1)
        settle([decode], SETTLED_S)
        wait_for(lambda: decode.figures()["pool_num_saved_chunks"] == len(prompt) // 8)
        assert decode.scheduler.reset_prefix_cache()
        prefill.submit("p", prompt, 1, {"do_remote_decode": True})
        wait_for(lambda: prefill.answers["p"].params is not None, prefill.step)
        pull, pool = (each._scheduler for each in children(decode.scheduler.connector))
        [store] = pool._client._stores.all
        answer: Future[Any] = Future()
        probe_now = store.probe
        monkeypatch.setattr(store, "probe", lambda keys: answer)
        params = (prefill.answers["p"].params or {}) | (CHANGES[1] if is_lost else {})
        decode.submit("d", prompt, 2, params)
        wait_for(lambda: pull._prompts.num_to_load("d", 0) == 0, decode.step)  # it has begun
        answer.set_result(probe_now(pool._by_request["d"].keys).result())
        settle([prefill, decode], SETTLED_S)
        assert decode.answers["d"].tokens == answer_to(prompt, 2)
        assert decode.figures()["pool_num_loaded_chunks"] == (num_chunks if is_lost else 0)
        for each in (prefill, decode):
            assert each.figures()["hook_errors"] == 0
            assert each.leftovers() == []


@pytest.mark.parametrize("window", [0, 6], ids=["full", "sliding"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("connector", ["HalPullConnector", "HalPushConnector"])
def test_any_order_of_events(
    connector: str, is_async: bool, policy: str, window: int, posts: Any
) -> None:
    configs = [
        engine_config(role, connector, policy, is_async=is_async, is_hybrid=window > 0)
        for role in ("kv_producer", "kv_consumer")
    ]
    is_push, may_fail = connector == "HalPushConnector", policy == "fail"
    run_orders(configs, window, posts, is_push=is_push, may_fail=may_fail, is_behind=False)


@pytest.mark.parametrize("connector", ["HalPullConnector", "HalPushConnector"])
def test_any_order_of_events_beside_the_pool_with_two_batches_in_flight(
    connector: str, posts: Any
) -> None:
    configs = [
        engine_config(role, connector, "recompute", is_async=True, pool=POOL)
        for role in ("kv_producer", "kv_consumer")
    ]
    is_push = connector == "HalPushConnector"
    run_orders(configs, 0, posts, is_push=is_push, may_fail=False, is_behind=True)


@pytest.mark.parametrize("is_behind", [False, True], ids=["runs at once", "runs later"])
@pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_blocks_are_kept_until_all_connectors_release_them(is_async: bool, is_behind: bool) -> None:
    """The pool has copied the blocks at once; the lease expires later."""
    prompt = PROMPTS[4]
    config = engine_config("kv_both", "HalPullConnector", "recompute", is_async=is_async, pool=POOL)
    with vllm_instance(config, NUM_BLOCKS, is_behind=is_behind) as prefill:
        prefill.submit("p", prompt, 1, {"do_remote_decode": True})
        for _ in range(20):
            if prefill.answers["p"].finish:
                break
            prefill.step()
            time.sleep(0.01)  # the time in which the store reports a miss
        assert prefill.answers["p"].finish == "length"
        deadline = time.monotonic() + 1.0  # half a lease
        while prefill.figures()["pool_saves_in_flight"] and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(5):  # the first step was scheduled before, with two batches in flight
            time.sleep(0.02)  # while the report is in flight
            prefill.step()
        assert prefill.figures()["pool_saves_in_flight"] == 0
        assert prefill.figures()["leases_held"] == 1
        assert prefill.num_free == NUM_BLOCKS - 1 - -(-len(prompt) // BLOCK_SIZE)
        settle([prefill], SETTLED_S)
        assert prefill.num_free == NUM_BLOCKS - 1
        assert prefill.leftovers() == []
        assert prefill.figures()["hook_errors"] == 0


def test_micro_batch_kv_is_pushed_when_computed(posts: Any) -> None:
    server, kept = posts
    kept.clear()
    configs = [
        engine_config(role, "HalPushConnector", "fail", is_async=False, num_ubatches=2)
        for role in ("kv_producer", "kv_consumer")
    ]
    with (
        vllm_instance(configs[0], NUM_BLOCKS) as prefill,
        vllm_instance(configs[1], NUM_BLOCKS) as decode,
    ):
        world = World(prefill, decode, server, kept)
        world.do("ask", 4, 3)
        deadline = time.monotonic() + SETTLED_S
        while not kept and time.monotonic() < deadline:
            world.do("steps", 1, 1)
        world.finish(forgets=False)
        world.check(may_fail=False)
        assert decode.figures()["loads"] == 1


@pytest.mark.parametrize("is_pool_first", [False, True], ids=["pool last", "pool first"])
@pytest.mark.parametrize("ending", ["abort", "error"])
@pytest.mark.parametrize("connector", ["HalPullConnector", "HalPushConnector"])
def test_awaited_prefill_may_end_while_the_pool_loads_for_it(
    connector: str,
    ending: str,
    is_pool_first: bool,
    posts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D has reserved blocks, which P has not written to yet: only the load's end frees P's."""
    server, kept = posts
    kept.clear()
    policy = "fail" if ending == "error" else "recompute"
    options: Any = {"is_async": False, "pool": POOL, "is_pool_first": is_pool_first}
    configs = [
        engine_config(role, connector, policy, **options) for role in ("kv_producer", "kv_consumer")
    ]
    params = {"do_remote_prefill": True, "metaserver": server.url("d")}
    if connector == "HalPullConnector":
        params["do_pull"] = True
    with (
        vllm_instance(configs[0], NUM_BLOCKS) as prefill,
        vllm_instance(configs[1], NUM_BLOCKS) as decode,
    ):
        prefill.submit("first", PROMPTS[4], 1)
        settle([prefill], SETTLED_S)
        wait_for(lambda: prefill.figures()["pool_num_saved_chunks"] == len(PROMPTS[4]) // 8)
        assert prefill.scheduler.reset_prefix_cache()
        decode.submit("d", PROMPTS[4], 2, params)
        wait_for(lambda: "d" in kept, decode.step)
        [pool] = [
            each._scheduler
            for each in children(prefill.scheduler.connector)
            if isinstance(each._scheduler, PoolSchedulerSide)
        ]
        loads: list[LoadRequest] = []
        monkeypatch.setattr(pool._client, "start_load", loads.append)
        prefill.submit("p", PROMPTS[4], 1, {"do_remote_decode": True} | kept["d"])
        wait_for(lambda: bool(loads), prefill.step)
        num_free = prefill.num_free
        if ending == "abort":
            prefill.abort("p")
            for _ in range(10):
                prefill.step()
                time.sleep(0.01)  # in which an early release would be reported
            assert prefill.num_free == num_free, "the pool may still write to the blocks"
        pool._on_event(PoolLoadEnded(loads[0].load_id, 0, "it is gone"))
        settle([prefill, decode], SETTLED_S)
        assert prefill.answers["p"].finish == ending
        for each in (prefill, decode):
            assert each.num_free == NUM_BLOCKS - 1
            assert each.figures()["hook_errors"] == 0
            assert each.leftovers() == []


def wait_for(is_over: Callable[[], bool], step: Callable[[], None] = lambda: None) -> None:
    """Step an instance until something has happened.

    Raises:
        AssertionError: it has not after ``SETTLED_S``.
    """
    deadline = time.monotonic() + SETTLED_S
    while not is_over():
        assert time.monotonic() < deadline
        step()
        time.sleep(PAUSE_S)
