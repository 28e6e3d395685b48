"""The proxy accepts the registrations that instances send."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from mooncake_api.instance_protocol import RegistrationMessage, signed_head
from mooncake_engine.config import Role
from mooncake_proxy.http1.upstream_connection import ClientContext, ClientLimits
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.pool.registrations import HEADER, Registrations


@pytest.mark.parametrize("role", Role)
def test_registration_of_every_role_is_accepted(role: Role) -> None:
    async def receive() -> None:
        pools = ModelPools(ClientContext(ClientLimits()))
        taking = Registrations(pools, lambda: 0.0, b"secret")
        for number, is_draining in enumerate((False, True)):
            message = RegistrationMessage(
                "http://10.0.0.1:8100", 1.0, number, role=role.value, is_draining=is_draining
            )
            body = msgspec.json.encode(message)
            head = signed_head(b"secret", "instance", body).encode()
            instance = taking.receive({HEADER: head}, body)
            assert len(pools) == (not is_draining)
            assert instance is None or is_draining or instance.spec.role.value == role.value
        pools.close()

    asyncio.run(receive())
