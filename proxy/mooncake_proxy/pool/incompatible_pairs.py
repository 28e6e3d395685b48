"""Finds the P and D of a pool that can't exchange KV, after every change of the pool.

A large fleet has many pairs, few different topologies, and few pairs that don't fit, if any. So no
function here looks at every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from mooncake_proxy.pool.pair_topology import PairTopology, incompatibility_reason

if TYPE_CHECKING:
    from mooncake_proxy.pool.instances import Instance


def compare_topologies(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
    """Find the peers that each P's topology is incompatible with.

    Topologies that differ in nothing but their epoch are compared once: a large fleet has many
    pairs and few different topologies.
    """
    for instance in (*prefills, *decodes):
        instance.incompatible_peers = frozenset()
    for senders, takers in product(_by_topology(prefills), _by_topology(decodes)):
        reason = incompatibility_reason(senders[0][1], takers[0][1])
        if reason is None:
            continue
        unfit = frozenset(theirs.engine_id for _, theirs in takers)
        for prefill, mine in senders:
            prefill.incompatible_peers |= unfit
            for decode, theirs in takers:
                key = f"unfit {mine.engine_id} {theirs.engine_id}"
                prefill.warn_once(key, f"is incompatible with {decode.name}: {reason}")


def unfit_pairs(
    prefills: Sequence[Instance], decodes: Sequence[Instance]
) -> set[tuple[Instance, Instance]]:
    """All P and D that can't exchange KV, which are few, by the peers that either of them rules out
    (`is_compatible`)."""
    prefills_by_id, decodes_by_id = _by_engine_id(prefills), _by_engine_id(decodes)
    return {
        *((each, peer) for each in prefills for peer in each.ruled_out(decodes_by_id)),
        *((peer, each) for each in decodes for peer in each.ruled_out(prefills_by_id)),
    }


def _by_engine_id(instances: Sequence[Instance]) -> dict[str, list[Instance]]:
    found: dict[str, list[Instance]] = {}
    for instance in instances:
        found.setdefault(instance.compatibility.engine_id, []).append(instance)
    return found


def _by_topology(instances: Sequence[Instance]) -> list[list[tuple[Instance, PairTopology]]]:
    """Instances whose topologies are known, in groups of equal ones."""
    groups: dict[bytes, list[tuple[Instance, PairTopology]]] = {}
    for instance in instances:
        if (topology := instance.topology) is not None:
            groups.setdefault(topology.facts(), []).append((instance, topology))
    return list(groups.values())
