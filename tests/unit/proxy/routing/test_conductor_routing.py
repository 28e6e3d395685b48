"""Which KV a request's `model` name means: the model's own, or an adapter's."""

from __future__ import annotations

import asyncio
import random
from unittest.mock import Mock

import pytest

from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import InstancePool, InstanceSpec, Role
from mooncake_proxy.routing.conductor_routing import ConductorRouting

LISTED = frozenset({"m", "also-m"})


@pytest.mark.parametrize(
    ("pool_name", "listed", "name", "adapter"),
    [
        ("m", LISTED, "m", ""),
        ("m", LISTED, "also-m", ""),
        ("m", LISTED, "new", "new"),
        ("m", LISTED, "sql", "sql"),
        ("m", None, "new", "new"),
        ("", LISTED, "m", ""),
        ("", LISTED, "new", "new"),
        ("", None, "m", ""),
        ("", None, "sql", "sql"),
    ],
)
def test_unpublished_adapter_is_not_an_alias_of_the_model(
    pool_name: str, listed: frozenset[str] | None, name: str, adapter: str
) -> None:
    """Instances have published KV of the model and of the adapter `sql`."""

    async def main() -> None:
        pool = InstancePool(ClientContext())
        publisher = pool.add(InstanceSpec(Origin("http", "a", 80), Role.BOTH))
        pool.add(InstanceSpec(Origin("http", "b", 80), Role.BOTH))
        publisher.base_models = listed
        now = asyncio.get_running_loop().time
        routing = ConductorRouting(pool, ConductorConfig(), random.Random(1), now, pool_name)
        routing.coupled.holdings._streams["a"] = Mock()
        routing.coupled.holdings.adapters.add("sql")
        assert routing._adapter_of(name) == adapter

    asyncio.run(main())


def test_without_publishers_all_names_differ_even_after_there_were_some() -> None:
    async def main() -> None:
        pool = InstancePool(ClientContext())
        now = asyncio.get_running_loop().time
        routing = ConductorRouting(pool, ConductorConfig(), random.Random(1), now)
        routing._feed = Mock()  # of a publisher that has left
        assert [routing._adapter_of(name) for name in ("m", "new")] == ["m", "new"]

    asyncio.run(main())
