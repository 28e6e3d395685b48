"""The instance pool reports what is missing to serve requests."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_proxy.errors import (
    NoInstance,
    NotFound,
)
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import InstancePool, InstanceSpec, Role


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
