"""The instance pool reports what is missing to serve requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mooncake_proxy.errors import (
    ModelNotFound,
    NoInstance,
    NotFound,
)
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instance_reports import (
    Compatibility,
    KVEventEndpoints,
    PoolUse,
    StoreLocation,
)
from mooncake_proxy.pool.instances import InstancePool, InstanceSpec, Role
from mooncake_proxy.pool.model_pools import ModelPools


def spec(port: int, source: str, role: Role = Role.DECODE) -> InstanceSpec:
    return InstanceSpec(Origin("http", "h", port), role, source=source)


def test_pool_reports_missing_instances() -> None:
    async def main() -> None:
        pool = InstancePool(ClientContext())
        with pytest.raises(NoInstance, match="no decode instance is configured"):
            pool.require(Role.DECODE)
        instance = pool.add(spec(1, "flags"))
        pool.set_up(instance, up=False, error="refused")
        with pytest.raises(NoInstance, match="http://h:1 down refused"):
            pool.require(Role.DECODE)
        with pytest.raises(NotFound, match="known: http://h:1"):
            pool.get("http://h:2")

    asyncio.run(main())


def test_names_of_a_model_outlive_its_last_instance_but_not_its_present_ones() -> None:
    async def main() -> None:
        pools = ModelPools(ClientContext())
        llama = replace(spec(1, "file"), models=("llama", "chat"))
        pools.add(llama)
        pools.add(replace(spec(2, "file"), models=("qwen",)))
        emptied = pools.pool_of("chat")
        pools.remove("http://h:1")
        assert pools.pool_of("chat") is pools.pool_of("llama") is emptied
        pools.add(replace(spec(2, "file"), models=("qwen", "chat")))
        assert pools.pool_of("chat") is pools.pool_of("qwen"), "the alias went over to it"
        pools.add(replace(llama, models=("llama",)))
        pools.add(replace(spec(2, "file"), models=("qwen",)))
        with pytest.raises(ModelNotFound):
            pools.pool_of("chat")

    asyncio.run(main())


def test_metrics_of_stores_on_other_hosts_loopback_are_left_out() -> None:
    remote = StoreLocation("store-2", 7701, "epoch")

    async def main() -> None:
        instance = InstancePool(ClientContext()).add(spec(1, "flags"))
        others = (PoolUse(remote, None, "*:7702"), PoolUse(remote, None, "[fd00::1]:7703"))
        use = PoolUse(None, None, "127.0.0.1:7702", others)
        instance.compatibility = Compatibility(kv_pool=use)
        assert [str(each) for each in instance.store_metrics] == [
            "http://store-2:7702",
            "http://[fd00::1]:7703",
        ]

    asyncio.run(main())


def test_events_of_stores_are_at_the_hosts_of_the_stores() -> None:
    """A wildcard is the host under which the instance reaches a store, on loopback its own."""
    events = KVEventEndpoints("tcp://*:5557", "tcp://*:5558", (), "6d")
    remote = StoreLocation("store-2", 7701, "epoch")

    async def main() -> None:
        instance = InstancePool(ClientContext()).add(spec(1, "flags"))
        assert instance.store_kv_events == ()
        others = (PoolUse(remote, events), PoolUse(), PoolUse(remote, events))
        instance.compatibility = Compatibility(kv_pool=PoolUse(None, events, None, others))
        assert [use.store for use in instance.stores] == [None, remote, None, remote]
        assert instance.store_kv_events == (
            KVEventEndpoints("tcp://h:5557", "tcp://h:5558", (), "6d"),
            KVEventEndpoints("tcp://store-2:5557", "tcp://store-2:5558", (), "6d"),
        )

    asyncio.run(main())


def test_declared_stores_count_until_an_instance_reports_its_own() -> None:
    declared = KVEventEndpoints("tcp://store-1:5557")
    reported = KVEventEndpoints("tcp://store-2:5557")

    async def main() -> None:
        declaration = replace(spec(1, "flags"), store_kv_events=(declared,))
        instance = InstancePool(ClientContext()).add(declaration)
        assert instance.store_kv_events == (declared,)
        instance.compatibility = Compatibility("epoch", data_parallel_size=1)  # one without a pool
        assert instance.store_kv_events == ()
        use = PoolUse(StoreLocation("store-2", 7701, "epoch"), reported)
        instance.compatibility = Compatibility("epoch", kv_pool=use, data_parallel_size=1)
        assert instance.store_kv_events == (reported,)

    asyncio.run(main())


def test_every_data_parallel_rank_publishes_at_ports_of_its_own() -> None:
    def ranks(events: KVEventEndpoints | None) -> list[tuple[str, str | None]]:
        assert events is not None
        return [(e.endpoint, e.replay_endpoint) for e in (events, *events.other_dp_ranks)]

    async def main() -> None:
        one = replace(spec(1, "flags"), kv_events_port=5557)
        three = replace(one, kv_events_replay_port=5657, data_parallel_size=3)
        instance = InstancePool(ClientContext()).add(one)
        assert ranks(instance.kv_events) == [("tcp://h:5557", None)]
        assert instance.dp_ranks is None
        instance.set_spec(three)
        assert ranks(instance.kv_events) == [
            (f"tcp://h:{5557 + rank}", f"tcp://h:{5657 + rank}") for rank in range(3)
        ]
        assert [rank.name for rank in instance.dp_ranks or ()] == [
            f"http://h:1#{i}" for i in (0, 1, 2)
        ]
        assert not instance.reported_dp_ranks
        instance.set_compatibility(Compatibility("epoch", data_parallel_size=2))
        assert len(ranks(instance.kv_events)) == len(instance.dp_ranks or ()) == 2
        assert instance.reported_dp_ranks is instance.dp_ranks

    asyncio.run(main())
