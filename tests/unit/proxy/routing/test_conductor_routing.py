"""Which KV a request's `model` name means, and what the conductor is told of a request."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mooncake_proxy.api.proxied_request import StreamTiming
from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instance_reports import Compatibility
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


def placed_request(pool: InstancePool, now: Mock) -> tuple[ConductorRouting, Any]:
    """A request, as a context, that is placed on the only pair."""
    pool.add(InstanceSpec(Origin("http", "p", 80), Role.PREFILL))
    pool.add(InstanceSpec(Origin("http", "d", 80), Role.DECODE))
    routing = ConductorRouting(pool, ConductorConfig(), random.Random(1), now)
    routed = routing.pairs.place(
        num_tokens=64,
        keys=(1,),
        token_limit=None,
        request_class="default",
        deadline=3600.0,
        now=now(),
    )
    context: Any = SimpleNamespace(routed=routed, arrival=now(), timing=StreamTiming())
    context.request = SimpleNamespace(ended=True, status=200)
    return routing, context


@pytest.mark.parametrize(("is_stream", "expected_s"), [(True, 2.0), (False, 10.0)])
def test_decode_duration_of_an_answer_that_is_not_streamed_is_unknown(
    is_stream: bool, expected_s: float
) -> None:
    """The whole answer arrives at once, so the decode would seem to have taken no time, and the
    streams of its class to end when they begin."""

    async def main() -> None:
        now = Mock(return_value=0.0)
        routing, context = placed_request(InstancePool(ClientContext()), now)
        context.parsed = SimpleNamespace(stream=is_stream)
        conductor = routing.pairs.conductor
        before = routing.pairs._output("default").value
        for at, report in ((1.0, routing.decoding), (3.0 if is_stream else 1.0, routing.ended)):
            now.return_value = at
            report(context)
        assert conductor.ledger.expected_seconds("default") == expected_s
        assert (routing.pairs._output("default").value == before) is not is_stream
        assert len(conductor.book) == 0

    asyncio.run(main())


def test_pass_that_the_conductor_does_not_place_ends_the_reservation_of_the_one_before() -> None:
    async def main() -> None:
        routing, context = placed_request(InstancePool(ClientContext()), Mock(return_value=0.0))
        assert len(routing.pairs.conductor.book) == 1
        routing.place(context, Role.DECODE)
        assert len(routing.pairs.conductor.book) == 0
        assert context.routed is None

    asyncio.run(main())


@pytest.mark.parametrize("is_refused", [False, True])
def test_prefill_that_fails_is_repeated_for_the_decode_instance_that_waits(
    is_refused: bool,
) -> None:
    """With push, D has reserved blocks before the prefill; p1 may be unable to send to it."""

    async def main() -> None:
        pool = InstancePool(ClientContext())
        prefills = [pool.add(_spec(f"p{number}", Role.PREFILL)) for number in range(3)]
        decodes = [pool.add(_spec(f"d{number}", Role.DECODE)) for number in range(6)]
        routing = ConductorRouting(pool, ConductorConfig(), random.Random(1), lambda: 1.0)
        for _ in range(20):
            context = _placed(routing)
            decoder = routing.choose(context, context.routed, Role.DECODE, [])
            failed = routing.choose(context, context.routed, Role.PREFILL, [])
            _, other = [each for each in prefills if each is not failed]
            refused = frozenset({decoder.name}) if is_refused else frozenset()
            for each in pool:
                pool.note_compatibility(each, Compatibility(engine_id=each.name))
            refusing = Compatibility(engine_id=other.name, refused_peers=refused)
            pool.note_compatibility(other, refusing)
            again = routing.choose(context, context.routed, Role.PREFILL, [failed])
            assert again in {*prefills} - {failed, other if is_refused else failed}
            assert routing.choose(context, context.routed, Role.DECODE, []) is decoder
            assert routing.pairs.conductor.ledger.now().num_sequences.sum() == 0
            elsewhere = routing.choose(context, context.routed, Role.DECODE, [decoder])
            assert elsewhere in {*decodes} - {decoder}
            routing.pairs.ended(context.routed, 1.0)

    asyncio.run(main())


def _spec(host: str, role: Role) -> InstanceSpec:
    return InstanceSpec(Origin("http", host, 80), role)


def _placed(routing: ConductorRouting) -> Any:
    """A request, as a context, that is placed on a pair."""
    routed = routing.pairs.place(
        num_tokens=640,
        keys=(1, 2),
        token_limit=None,
        request_class="default",
        deadline=3600.0,
        now=1.0,
    )
    return SimpleNamespace(routed=routed, request_id="r")
