"""Who writes which bytes in a push: the plan that each reader would make, seen by one writer.

A decode rank's placement decides: for each part of its KV one prefill rank is elected, exactly as
if the decode rank were to read. A prefill rank writes what it was elected for. So every byte is
written once for every pair of tensor-parallel sizes, and both sides know how many come from where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.plan import (
    KVPlacement,
    Movement,
    PeerSpans,
    elect_sources,
    intersect,
    plan_transfer,
)
from mooncake_hal.transport import Spans


@dataclass(frozen=True, slots=True)
class PushSides:
    """A pair of instances.

    Args:
        geometry: of the model.
        writers, readers: all prefill ranks and all decode ranks.
    """

    geometry: KVGeometry
    writers: tuple[KVPlacement, ...]
    readers: tuple[KVPlacement, ...]


def plan_push(sides: PushSides, writer: int, movement: Movement) -> list[PeerSpans]:
    """What one writer has to write.

    Args:
        sides: both instances.
        writer: index of the prefill rank that plans.
        movement: ``local`` is the writer's side; ``layers`` None means all.

    Returns:
        Spans per decode rank that gets anything from this writer.

    Raises:
        PlanError: the block tables are too short, or the writers don't hold what a reader needs.
    """
    shards = [placement.shard for placement in sides.writers]
    swapped = replace(
        movement, local_blocks=movement.remote_blocks, remote_blocks=movement.local_blocks
    )
    plans = []
    for reader, placement in enumerate(sides.readers):
        if writer not in elect_sources(placement.shard, shards, movement.spread):
            continue
        for plan in plan_transfer(sides.geometry, placement, sides.writers, swapped):
            if plan.peer == writer:
                spans = Spans(plan.spans.remote, plan.spans.local, plan.spans.nbytes)
                plans.append(PeerSpans(reader, spans))
    return plans


def expected_bytes(
    geometry: KVGeometry,
    writers: Sequence[KVShard],
    readers: Sequence[KVShard],
    num_tokens: int,
    spread: int,
) -> dict[tuple[int, int], int]:
    """How many bytes each (writer, reader) pair has to move for ``num_tokens`` of all layers.

    Raises:
        PlanError: the writers don't hold what a reader needs.
    """
    if num_tokens <= 0:
        return {}
    token_bytes = sum(geometry.plane_dims) * geometry.element_bytes
    expected = {}
    for reader, wanted in enumerate(readers):
        for writer in elect_sources(wanted, writers, spread):
            box = intersect(wanted, writers[writer])
            expected[writer, reader] = box.layers * box.heads * num_tokens * token_bytes
    return expected
