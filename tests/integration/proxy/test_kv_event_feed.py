"""The proxy's prefix index agrees with what instances hold after a soak over real sockets."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace as replace_field
from pathlib import Path

import pytest
import uvloop
from msgspec.structs import replace
from support.kv_publisher import FaultyPublisher
from support.proxy_conductor import conductor_of, settings
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.prompt_keys import chain_root, token_keys
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.store.chunk_store import Chunk, ChunkContent, WriteHandle
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_proxy.pool import kv_event_feed
from mooncake_proxy.pool.instance_reports import Compatibility, KVEventEndpoints, PoolUse
from mooncake_proxy.routing.conductor_fleet import ConductorFleet


@pytest.fixture(autouse=True)
def no_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore measured times: on a busy machine those of fake instances say nothing about real
    ones."""
    monkeypatch.setattr(ConductorFleet, "measure_prefill", lambda *args: None)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until a condition that depends on threads and sockets holds."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def follow(s: FakeDeployment, url: str, *publishers: FaultyPublisher) -> ConductorFleet:
    """Subscribe the proxy to these publishers as the instance's ranks, as after a health check."""
    pool, fleet = s.app.router.pool, conductor_of(s).pairs
    first, *others = (
        KVEventEndpoints(f"tcp://0.0.0.0:{each.port}", f"tcp://*:{each.replay_port}")
        for each in publishers
    )
    instance = pool.get(url)
    known = instance.compatibility
    report = Compatibility(
        known.engine_id or url,
        known.refused_peers,
        replace(first, other_dp_ranks=tuple(others)),
        data_parallel_size=len(publishers),
    )
    pool.note_compatibility(instance, report)
    fleet.sync_with_pool(s.app.router.now())
    return fleet


def claimed(fleet: ConductorFleet, url: str, keys: set[int]) -> set[int]:
    """The keys that the index attributes to the instance."""
    slot = next(slot for slot, name in fleet.conductor.fleet.names.items() if name == url)
    index = fleet.conductor.index
    return {key for key in keys if index.match([key], 0.0).local[slot]}


async def serve(publisher: FaultyPublisher) -> set[int]:
    """Store and evict prompts; returns the keys of all that was ever held."""
    known: set[int] = set()
    for number in range(30):
        publisher.store([number % 4] * 200 + [number] * 100)
        known |= publisher.keys()
        publisher.evict(10)
        await asyncio.sleep(0.002)
    publisher.settle()
    return known


@pytest.mark.parametrize("seed", [1, 2])
def test_index_is_correct_after_lost_repeated_and_reordered_events(seed: int) -> None:
    async def soak(s: FakeDeployment, publisher: FaultyPublisher) -> None:
        url, rng = s.prefill.url, random.Random(seed)
        fleet = follow(s, url, publisher)
        known: set[int] = set()
        for round_ in range(40):
            prompt = [rng.randrange(3)] * 160 + [rng.randrange(9)] * rng.randrange(300)
            publisher.store(prompt)
            known |= publisher.keys()
            publisher.evict(rng.randrange(12))
            if round_ == 15:
                publisher.clear()
            if round_ == 25:
                publisher.restart()
            await asyncio.sleep(0.002)
        publisher.settle()
        known |= publisher.keys()
        assert publisher.keys()
        await until(lambda: claimed(fleet, url, known) == publisher.keys())

    async def main() -> None:
        with closing(FaultyPublisher(seed)) as publisher:
            async with fake_deployment(2, 1, **settings()) as s:
                await soak(s, publisher)

    uvloop.run(main())


def test_index_without_replay_claims_no_evicted_blocks() -> None:
    async def main() -> None:
        with closing(FaultyPublisher(3, num_kept=0)) as publisher:
            async with fake_deployment(1, 1, **settings()) as s:
                fleet = follow(s, s.prefill.url, publisher)
                await asyncio.sleep(0.3)  # subscribing is asynchronous
                known = await serve(publisher)
                await until(lambda: claimed(fleet, s.prefill.url, known) <= publisher.keys())

    uvloop.run(main())


@pytest.mark.parametrize("seed", [8, 9])
def test_index_is_correct_with_snapshots_and_no_replay(seed: int) -> None:
    async def main() -> None:
        with closing(FaultyPublisher(seed, num_kept=0, has_snapshots=True)) as publisher:
            publisher.store([5] * 300)  # before the proxy subscribes
            async with fake_deployment(1, 1, **settings()) as s:
                known, fleet = publisher.keys(), follow(s, s.prefill.url, publisher)
                known |= await serve(publisher)
                held = publisher.keys()
                await until(lambda: claimed(fleet, s.prefill.url, known) == held)

    uvloop.run(main())


def test_chunks_of_store_stay_indexed_after_device_eviction(tmp_path: Path) -> None:
    """A store publishes its own events, independently of those of the devices."""
    ids, path = list(range(2000, 2640)), f"ipc://{tmp_path}"
    events = KVEventsConfig(True, None, f"{path}/events", f"{path}/replay")

    async def main() -> None:
        with closing(NodeStore(NodeStoreConfig(1 << 20, kv_events=events))) as store:
            async with fake_deployment(3, 1, **settings()) as s:
                url = s.prefills[2].url
                fleet = follow_store(s, url, store)
                device = set(token_keys(list(range(64))))
                slot = fleet.slot(s.app.router.pool.get(url))
                assert slot is not None
                put(store, ids)
                held = set(token_keys(ids))
                await until(lambda: claimed(fleet, url, held) == held)
                fleet.holdings.note_processed(slot, tuple(device))
                assert claimed(fleet, url, held | device) == held | device
                for _ in range(4):
                    assert (await post(s, BODY | {"prompt": ids})).status_code == 200
                assert [len(fake.generated) for fake in s.prefills] == [0, 0, 4]
                store.drop([chunk.key for found in store.chunks().values() for chunk in found])
                index = fleet.conductor.index
                await until(lambda: not index.num_held(slot, Tier.HOST))
                assert index.num_held(slot, Tier.DEVICE) == len(held | device)

    uvloop.run(main())


def follow_store(s: FakeDeployment, url: str, store: NodeStore) -> ConductorFleet:
    """Subscribe the proxy to the instance's store, as after a health check."""
    pool, fleet = s.app.router.pool, conductor_of(s).pairs
    found = store.arena.kv_events
    assert found is not None
    endpoints = KVEventEndpoints(found.endpoint, found.replay_endpoint, (), "6d")
    instance = pool.get(url)
    known = instance.compatibility
    use = PoolUse(None, endpoints)
    pool.note_compatibility(instance, replace(known, engine_id=known.engine_id or url, kv_pool=use))
    fleet.sync_with_pool(s.app.router.now())
    return fleet


def put(store: NodeStore, ids: list[int]) -> None:
    """Put a prompt into a store, in chunks of 128 tokens."""
    names = [b"chunk-%d" % at for at in range(0, len(ids), 128)]
    chunks = [
        Chunk(
            name,
            names[number - 1] if number else None,
            number,
            1 << 12,
            128,
            content=ChunkContent(b"m", array("I", ids[number * 128 :][:128]).tobytes()),
        )
        for number, name in enumerate(names)
    ]
    user = store.open_user()
    user.commit([each for each in user.reserve(chunks).result() if isinstance(each, WriteHandle)])
    user.close()


def test_prompt_cached_through_another_proxy_is_found() -> None:
    async def main() -> None:
        with closing(FaultyPublisher(4, loss=0.0)) as publisher:
            async with fake_deployment(3, 1, **settings()) as s:
                ids = list(range(500, 500 + 640))
                publisher.store(ids)  # before the proxy subscribes: the replay has it
                url = s.prefills[2].url
                fleet = follow(s, url, publisher)
                await until(lambda: claimed(fleet, url, set(token_keys(ids))) == publisher.keys())
                for _ in range(4):
                    assert (await post(s, BODY | {"prompt": ids})).status_code == 200
                assert [len(fake.generated) for fake in s.prefills] == [0, 0, 4]

    uvloop.run(main())


def test_prompts_of_adapter_and_model_are_distinct() -> None:
    """The same tokens: one instance holds them for the adapter, another for the model."""

    async def main() -> None:
        with (
            closing(FaultyPublisher(11, loss=0.0)) as of_adapter,
            closing(FaultyPublisher(12, loss=0.0)) as of_model,
        ):
            async with fake_deployment(3, 1, **settings()) as s:
                ids, urls = list(range(640)), [each.url for each in s.prefills]
                of_adapter.store_for("sql", ids)
                of_model.store(ids)
                keys = set(token_keys(ids, chain_root("sql")))
                fleet = follow(s, urls[1], of_adapter)
                await until(lambda: claimed(fleet, urls[1], keys) == keys)
                follow(s, urls[2], of_model)
                held = of_model.keys()
                await until(lambda: claimed(fleet, urls[2], held) == held)
                for name in ("sql", "m", "another name of m", "sql"):
                    body = BODY | {"prompt": ids, "model": name}
                    assert (await post(s, body)).status_code == 200
                assert [len(fake.generated) for fake in s.prefills] == [0, 2, 2]

    uvloop.run(main())


def test_unpublished_model_names_have_separate_chain_roots() -> None:
    async def main() -> None:
        async with fake_deployment(1, 1, **settings()) as s:
            ids = list(range(640))
            for name in ("sql", "m", "sql"):
                body = BODY | {"prompt": ids, "model": name}
                assert (await post(s, body)).status_code == 200
                routed = [*conductor_of(s)._records.values()][-1]
                assert routed.request.keys == token_keys(ids, chain_root(name))

    uvloop.run(main())


def test_prompt_goes_to_rank_that_published_it() -> None:
    """Two ranks of one instance: the blocks that one of them evicts may still be held by the
    other."""

    async def main() -> None:
        with (
            closing(FaultyPublisher(6, loss=0.0)) as first,
            closing(FaultyPublisher(7, loss=0.0)) as second,
        ):
            async with fake_deployment(1, 1, **settings()) as s:
                shared, own = list(range(640)), list(range(640, 1280))
                first.store(shared)
                second.store(shared)
                second.store(own)
                fleet = follow(s, s.prefill.url, first, second)
                known = second.keys()
                await until(lambda: claimed(fleet, s.prefill.url, known) == known)
                for prompt in (own, shared, list(range(2000, 2640))):
                    assert (await post(s, BODY | {"prompt": prompt})).status_code == 200
                ranks = [seen.headers.get("x-data-parallel-rank") for seen in s.prefill.generated]
                assert ranks[0] == "1"
                assert ranks[1] in ("0", "1")
                assert ranks[2] is None, "no rank has it: the instance chooses"
                first.clear()
                await asyncio.sleep(0)
                second.evict(80)
                await until(lambda: not claimed(fleet, s.prefill.url, known))

    uvloop.run(main())


def test_removed_instance_is_unsubscribed() -> None:
    async def main() -> None:
        with closing(FaultyPublisher(5, loss=0.0)) as publisher:
            async with fake_deployment(2, 1, **settings()) as s:
                ids, url, pool = list(range(640)), s.prefill.url, s.app.router.pool
                publisher.store(ids)
                fleet = follow(s, url, publisher)
                await until(lambda: bool(claimed(fleet, url, publisher.keys())))
                spec = pool.get(url).spec
                pool.remove(url)
                fleet.sync_with_pool(s.app.router.now())
                held = publisher.keys()
                assert not any(fleet.conductor.index.num_copies(key) for key in held)
                pool.add(spec)
                fleet = follow(s, url, publisher)
                await until(lambda: claimed(fleet, url, publisher.keys()) == publisher.keys())

    uvloop.run(main())


def test_briefly_unreachable_instance_stays_subscribed() -> None:
    async def main() -> None:
        with closing(FaultyPublisher(5, loss=0.0)) as publisher:
            async with fake_deployment(2, 1, **settings()) as s:
                url, pool = s.prefill.url, s.app.router.pool
                publisher.store(list(range(640)))
                fleet = follow(s, url, publisher)
                await until(lambda: claimed(fleet, url, publisher.keys()) == publisher.keys())
                pool.set_up(pool.get(url), up=False, error="checks came late")
                fleet.sync_with_pool(s.app.router.now())
                publisher.store(list(range(5000, 5640)))
                await until(lambda: claimed(fleet, url, publisher.keys()) == publisher.keys())

    uvloop.run(main())


@pytest.mark.parametrize("reports_epoch", [True, False])
def test_restarted_instance_that_publishes_nothing_yet_holds_nothing(
    *, reports_epoch: bool
) -> None:
    """One that reports its epochs has another one; of another engine it is known that it was
    down."""

    async def main() -> None:
        with closing(FaultyPublisher(5, loss=0.0)) as publisher:
            async with fake_deployment(2, 1, **settings()) as s:
                url, app = s.prefill.url, s.app
                instance = app.router.pool.get(url)
                publisher.store(list(range(640)))
                fleet = follow(s, url, publisher)
                known = publisher.keys()
                await until(lambda: claimed(fleet, url, known) == known)
                if not reports_epoch:
                    report = replace(instance.compatibility, engine_id="")
                    app.router.pool.note_compatibility(instance, report)
                app.router.pool.set_up(instance, up=False, error="restarts")
                app.routers.note_verdict(instance)
                assert claimed(fleet, url, known) == known, "it may just have been slow"
                publisher.restart()
                app.router.pool.set_up(instance, up=True)
                if reports_epoch:
                    app.routers.note_restart(instance)
                app.routers.note_verdict(instance)
                assert claimed(fleet, url, known) == set()
                publisher.store(list(range(5000, 5640)))
                await until(lambda: claimed(fleet, url, publisher.keys()) == publisher.keys())

    uvloop.run(main())


def test_configured_ports_override_published_ones() -> None:
    async def main() -> None:
        async with fake_deployment(1, 1) as s:
            instance = s.app.router.pool.get(s.prefill.url)
            assert instance.kv_events is None
            instance.set_spec(replace_field(instance.spec, kv_events_port=5557))
            assert instance.kv_events == KVEventEndpoints("tcp://127.0.0.1:5557")
            instance.set_spec(replace_field(instance.spec, kv_events_replay_port=5558))
            assert instance.kv_events is not None
            assert instance.kv_events.replay_endpoint == "tcp://127.0.0.1:5558"

    uvloop.run(main())


def test_late_replay_answer_is_not_matched_to_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot with the next batch's sequence number is no replay of that batch."""
    monkeypatch.setattr(kv_event_feed, "REPLAY_TIMEOUT_S", 0.1)

    async def main() -> None:
        publisher = FaultyPublisher(10, loss=0.0, has_snapshots=True, delay_s=0.5)
        with closing(publisher):
            publisher.store([1] * 300)
            async with fake_deployment(1, 1, **settings()) as s:
                fleet, url = follow(s, s.prefill.url, publisher), s.prefill.url
                await asyncio.sleep(0.8)  # timed out, and answered late
                publisher.delay_s = 0.0
                known = publisher.keys()
                publisher.clear()
                publisher.store([2] * 300)
                known |= publisher.keys()
                await until(lambda: claimed(fleet, url, known) == publisher.keys())

    uvloop.run(main())
