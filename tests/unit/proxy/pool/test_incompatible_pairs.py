"""Which P and D of a pool can't exchange KV, found without a look at every pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product

import pytest

from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool import incompatible_pairs
from mooncake_proxy.pool.instance_reports import Compatibility
from mooncake_proxy.pool.instances import InstancePool, InstanceSpec, Role
from mooncake_proxy.pool.pair_topology import PairTopology, TransportRules, incompatibility_reason

NUM_OF_EACH_ROLE = 6


def fleet(model_of: Callable[[Role, int], str]) -> InstancePool:
    """P and D whose topologies are equal but for the model; engine ids are p0 to p5, d0 to d5."""
    pool = InstancePool(ClientContext())
    for role, number in product((Role.PREFILL, Role.DECODE), range(NUM_OF_EACH_ROLE)):
        instance = pool.add(InstanceSpec(Origin("http", role.label, 8000 + number), role))
        epoch = f"{role.label[0]}{number}"
        topology = PairTopology(
            epoch,
            transports={"tcp": TransportRules()},
            must_match={"model": model_of(role, number)},
        )
        pool.note_topology(instance, topology)
        pool.note_compatibility(instance, Compatibility(epoch))
    return pool


def test_topologies_that_differ_only_in_their_epochs_are_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[str, str]] = []

    def compare(prefill: PairTopology, decode: PairTopology) -> str | None:
        compared.append((prefill.must_match["model"], decode.must_match["model"]))
        return incompatibility_reason(prefill, decode)

    async def main() -> None:
        pool = fleet(lambda role, number: "new" if role is Role.PREFILL and number else "old")
        monkeypatch.setattr(incompatible_pairs, "incompatibility_reason", compare)
        pool.set_up(next(iter(pool)), up=False, error="refused")
        pool.set_up(next(iter(pool)), up=True)

    asyncio.run(main())
    assert sorted(compared) == [("new", "old"), ("new", "old"), ("old", "old")]


def test_pairs_are_those_that_neither_side_rules_out() -> None:
    refused = {"p1": {"d4"}, "d2": {"p0", "p5"}, "d3": {"p0", "p1", "p2", "p3", "p4", "p5"}}

    async def main() -> None:
        pool = fleet(lambda _, number: "new" if number == 5 else "old")
        assert pool.has_incompatible_pairs
        for instance in pool:
            own = instance.compatibility.engine_id
            peers = frozenset(refused.get(own, ()))
            pool.note_compatibility(instance, Compatibility(own, peers))
        prefills, decodes = pool.live(Role.PREFILL), pool.live(Role.DECODE)
        pairs = [pair for pair in product(prefills, decodes) if pair[0].is_compatible(pair[1])]
        assert len(pairs) == 1 + 5 * 5 - 1 - 1 - 5
        assert {each for each in pool if pool.is_paired(each)} == {
            i for pair in pairs for i in pair
        }
        assert [each.compatibility.engine_id for each in pool if not pool.is_paired(each)] == ["d3"]
        assert pool.can_disaggregate

    asyncio.run(main())


def test_no_pair_is_left_where_all_are_ruled_out() -> None:
    async def main() -> None:
        pool = fleet(lambda role, _: role.label)
        assert pool.has_incompatible_pairs
        assert not pool.can_disaggregate
        assert not any(pool.is_paired(each) for each in pool)

    asyncio.run(main())
