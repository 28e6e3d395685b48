"""The proxy accepts the registrations that instances send."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_engine.config import Role
from mooncake_engine.server import registration as engine
from mooncake_proxy.api.admin_routes import REGISTER_PATH
from mooncake_proxy.http1.http_wire import signed_head
from mooncake_proxy.http1.upstream_connection import ClientContext, ClientLimits
from mooncake_proxy.pool import registrations as proxy
from mooncake_proxy.pool.model_pools import ModelPools


def test_instance_and_proxy_agree_on_path_and_signature() -> None:
    assert engine.PATH == REGISTER_PATH
    assert engine.HEADER.lower().encode() == proxy.HEADER
    assert engine.signed_head(b"s", "words", b"body") == signed_head(b"s", "words", b"body")


@pytest.mark.parametrize("role", Role)
def test_registration_is_accepted(role: Role) -> None:
    async def receive() -> None:
        pools = ModelPools(ClientContext(ClientLimits()))
        taking = proxy.Registrations(pools, lambda: 0.0, b"secret")
        said = engine.Announcement("http://10.0.0.1:8100", role, 15.0, 1.0)
        for number, is_draining in enumerate((False, True)):
            body = said.body(number, is_draining=is_draining)
            head = engine.signed_head(b"secret", "instance", body).encode()
            instance = taking.receive({proxy.HEADER: head}, body)
            assert len(pools) == (not is_draining)
            assert instance is None or is_draining or instance.spec.role.value == role.value
        pools.close()

    asyncio.run(receive())
