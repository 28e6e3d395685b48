"""What of a pushed prompt is due, and who writes which bytes. Pure: moves nothing.

A step computes a range of tokens, layer after layer. Each layer is due as soon as its hook has
fired; what no hook spoke of is due when the step is over. A request that starts over (after
preemption) sends everything again: its blocks may have been somebody else's in between.

A decode rank's shard decides who writes: for each part of its KV one prefill rank is elected,
exactly as if the decode rank were to read. A prefill rank writes what it was elected for. So every
byte is written once for every pair of tensor-parallel sizes, and both sides know how many come from
where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.transfer_plan import (
    BlockTransfer,
    KVShardSpec,
    PeerSpans,
    elect_sources,
    intersect,
    plan_transfer,
)
from mooncake_hal.transport import Spans


@dataclass(frozen=True, slots=True)
class Portion:
    """Layers of tokens that may be sent.

    Args:
        pass_number: of the pass over the prompt that computed them; a later pass replaces it.
        tokens: half-open range of positions.
        layers: half-open range of the model's layers.
        block_ids: the request's table when they were computed.
    """

    pass_number: int
    tokens: tuple[int, int]
    layers: tuple[int, int]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Step:
    tokens: tuple[int, int]
    block_ids: tuple[int, ...]
    missing: set[int]


@dataclass(slots=True)
class PromptProgress:
    """What has become due of one request.

    Args:
        layers: half-open range of the model's layers that this rank has.
        unit: tokens that are moved as one: until the prompt ends, whole units are due.
    """

    layers: tuple[int, int]
    unit: int = 1
    pass_number: int = 0
    _block_ids: list[int] = field(default_factory=list)
    _num_due: int = 0  # tokens before this one are due in all layers
    _step: _Step | None = None

    def begin_pass(self, block_ids: Iterable[int]) -> None:
        """The request begins to run, or starts over: forget what was due."""
        self.pass_number += 1
        self._block_ids = list(block_ids)
        self._num_due = 0
        self._step = None

    def begin_step(self, stop: int, new_block_ids: Iterable[int]) -> list[Portion]:
        """A step runs the tokens before ``stop``; returns what the last one left.

        Tokens before the step's first, found in the prefix cache, become due with it.
        """
        left = self.end_step()
        self._block_ids.extend(new_block_ids)
        stop -= stop % self.unit
        if stop > self._num_due:
            self._step = _Step(
                (self._num_due, stop), tuple(self._block_ids), set(range(*self.layers))
            )
            self._num_due = stop
        return left

    def layer_done(self, layer: int) -> Portion | None:
        """The step's KV of that layer is written; None if it is known already."""
        step = self._step
        if step is None or layer not in step.missing:
            return None
        step.missing.remove(layer)
        return Portion(self.pass_number, step.tokens, (layer, layer + 1), step.block_ids)

    def end_step(self) -> list[Portion]:
        """The step is over: what no hook spoke of is due now."""
        step, self._step = self._step, None
        if step is None:
            return []
        return [
            Portion(self.pass_number, step.tokens, layers, step.block_ids)
            for layers in _runs(sorted(step.missing))
        ]

    def end_pass(self, stop: int, block_ids: Iterable[int]) -> list[Portion]:
        """All tokens before ``stop`` are computed; returns all that was not yet due."""
        left = self.end_step()
        if self._num_due < stop:
            tokens = (self._num_due, stop)
            left.append(Portion(self.pass_number, tokens, self.layers, tuple(block_ids)))
            self._num_due = stop
        return left


def merge_portions(portions: Iterable[Portion]) -> list[Portion]:
    """Join portions of the same tokens whose layers follow each other: fewer, larger transfers."""
    merged: list[Portion] = []
    for portion in portions:
        last = merged[-1] if merged else None
        if last is not None and _continues(last, portion):
            merged[-1] = Portion(
                last.pass_number, last.tokens, (last.layers[0], portion.layers[1]), last.block_ids
            )
        else:
            merged.append(portion)
    return merged


def _continues(last: Portion, portion: Portion) -> bool:
    return (
        last.pass_number == portion.pass_number
        and last.tokens == portion.tokens
        and last.layers[1] == portion.layers[0]
    )


def _runs(layers: list[int]) -> list[tuple[int, int]]:
    """Sorted layer indices as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs


@dataclass(frozen=True, slots=True)
class InstancePair:
    """A pair of instances.

    Args:
        geometry: of the model.
        writers, readers: all prefill ranks and all decode ranks.
    """

    geometry: KVGeometry
    writers: tuple[KVShardSpec, ...]
    readers: tuple[KVShardSpec, ...]


def plan_push(sides: InstancePair, writer: int, movement: BlockTransfer) -> list[PeerSpans]:
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
    tokens: tuple[int, int],
    spread: int,
    block_size: int,
) -> dict[tuple[int, int], int]:
    """How many bytes each (writer, reader) pair has to move for a prompt's tokens from one on to
    its end, in all layers; of units that tokens are moved in, all that these tokens are in.

    Raises:
        PlanError: the writers don't hold what a reader needs.
    """
    if tokens[0] >= tokens[1]:
        return {}
    unit_bytes = sum(geometry.plane_dims) * geometry.element_bytes
    expected = {}
    for reader, wanted in enumerate(readers):
        for writer in elect_sources(wanted, writers, spread):
            box = intersect(wanted, writers[writer])
            num_units = 0
            for group in geometry.tables:
                first, last = group.counted(box.layer_start, box.layer_stop)
                start, stop = group.kept(tokens, tokens[1], block_size)
                num_units += (last - first) * (-(-stop // geometry.unit) - start // geometry.unit)
            if num_units:
                expected[writer, reader] = box.heads * num_units * unit_bytes
    return expected
