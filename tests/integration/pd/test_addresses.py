"""KV transfer between instances that bind one address and publish another, within a port range."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.pd import Instance, ask, ask_pair, instance, make_config, pair, prompt_of
from support.ports import free_range
from support.push import LAYERWISE, ask_pushed, push_pair

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import Role
from mooncake_engine.errors import PortInUse
from mooncake_hal.port_range import PortRange
from mooncake_hal.session import authentication
from mooncake_hal.transports.tcp import tcp_sockets

PROMPT = prompt_of(100)
OVER_TCP: dict[str, Any] = {"transports": ("tcp",)}
OPEN = {**OVER_TCP, "secret": "of the deployment"}


def check_published(of: Instance, host: str, ports: PortRange) -> None:
    """Check that side channel and ranks publish that host, and ports of that range."""
    topology = of.core.report().topology
    assert topology is not None
    advertised = [(topology.host, topology.port)]
    for rank in topology.ranks:
        address = authentication.decode_address(
            rank.endpoints["tcp"], tcp_sockets.TcpAddress, "tcp"
        )
        advertised.append((address.host, address.port))
    assert {host} == {name for name, _ in advertised}
    assert len({port for _, port in advertised} & set(ports)) == len(advertised)


@pytest.mark.parametrize(
    ("connector", "host", "advertised", "sizes"),
    [
        ("MooncakeConnector", "0.0.0.0", "127.0.0.2", ({"tp_size": 2}, {"pp_size": 2})),
        ("MooncakeConnector", "[::1]", "", ({}, {})),
        (LAYERWISE, "0.0.0.0", "127.0.0.2", ({}, {})),
        (LAYERWISE, "::1", "", ({}, {})),
    ],
)
def test_peers_connect_to_published_addresses(
    model: Path, connector: str, host: str, advertised: str, sizes: tuple[dict[str, int], ...]
) -> None:
    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        sides = [
            {
                **OPEN,
                **size,
                "host": host,
                "advertise_host": advertised,
                "port_range": free_range(3),
            }
            for size in sizes
        ]
        pushes = connector == LAYERWISE
        both = push_pair if pushes else pair
        async with both(model, prefill=sides[0], decode=sides[1]) as of:  # type: ignore[operator]
            for side, options in zip((of.prefill, of.decode), sides, strict=True):
                check_published(side, advertised or "::1", options["port_range"])
            answer = await (ask_pushed(of, PROMPT) if pushes else ask_pair(of, PROMPT))
            assert answer.tokens == expected
            assert of.decode.stat("load_failures") == 0
            assert of.decode.stat("bytes_received") > 0

    asyncio.run(main())


def test_port_range_smaller_than_ranks_is_rejected_with_count(model: Path) -> None:
    ports = free_range(2)
    config = make_config(model, Role.PREFILL, tp_size=2, port_range=ports, **OVER_TCP)
    message = (
        f"3 ports of --kv-port-range {ports} are needed on 127.0.0.1, but only 2 are free: each of "
        "2 ranks needs 1 for its transports, the side channel 1"
    )
    with pytest.raises(PortInUse, match=message):
        build_engine(config)
