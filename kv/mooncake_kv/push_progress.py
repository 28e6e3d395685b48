"""Decides which parts of a pushed prompt are due, and which rank writes which bytes. Pure: moves
nothing.

A step computes a range of tokens, layer after layer. Each layer is due as soon as its callback has
fired; layers without a callback are due when the step is enqueued. A request that restarts (after
preemption) sends everything again, because its blocks may have belonged to another request in
between.

For each part of a decode rank's KV one prefill rank is elected as the writer, exactly as if the
decode rank were to read it. A prefill rank writes the parts that it was elected for. So every byte
is written exactly once for every pair of tensor-parallel sizes, and both sides know how many bytes
come from which rank.
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
    """A range of tokens in a range of layers whose KV may be sent.

    Args:
        pass_number: number of the pass over the prompt that computed it; a later pass replaces it.
        tokens: half-open range of positions.
        layers: half-open range of the model's layers.
        block_ids: the request's block table when it was computed.
    """

    pass_number: int
    tokens: tuple[int, int]
    layers: tuple[int, int]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Step:
    """The current step of a request; ``missing`` are the layers that are not yet due."""

    tokens: tuple[int, int]
    block_ids: tuple[int, ...]
    missing: set[int]


@dataclass(slots=True)
class PromptProgress:
    """Tracks which portions of one request have become due.

    Args:
        layers: half-open range of the model's layers that this rank holds.
        unit: tokens that are moved as one; until the prompt ends, only whole units are due.
        pass_number: number of the current pass over the prompt; 0 before the first.
    """

    layers: tuple[int, int]
    unit: int = 1
    pass_number: int = 0
    _block_ids: list[int] = field(default_factory=list)
    _num_due: int = 0  # tokens before this one are due in all layers
    _step: _Step | None = None

    def begin_pass(self, block_ids: Iterable[int]) -> None:
        """Start a pass over the prompt: the request runs for the first time, or restarts."""
        self.pass_number += 1
        self._block_ids = list(block_ids)
        self._num_due = 0
        self._step = None

    def begin_step(self, stop: int, new_block_ids: Iterable[int]) -> list[Portion]:
        """Start a step that computes the tokens before ``stop``. Returns the portions that the
        previous step left.

        Tokens before the step's first one that were found in the prefix cache become due with it.
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
        """Mark the step's KV of a layer as written; returns None if it was marked already."""
        step = self._step
        if step is None or layer not in step.missing:
            return None
        step.missing.remove(layer)
        return Portion(self.pass_number, step.tokens, (layer, layer + 1), step.block_ids)

    def end_step(self) -> list[Portion]:
        """End the step; returns the layers that had no callback, which are due now."""
        step, self._step = self._step, None
        if step is None:
            return []
        return [
            Portion(self.pass_number, step.tokens, layers, step.block_ids)
            for layers in _runs(sorted(step.missing))
        ]

    def end_pass(self, stop: int, block_ids: Iterable[int]) -> list[Portion]:
        """End the pass: all tokens before ``stop`` are computed. Returns everything that was not
        yet due."""
        left = self.end_step()
        if self._num_due < stop:
            tokens = (self._num_due, stop)
            left.append(Portion(self.pass_number, tokens, self.layers, tuple(block_ids)))
            self._num_due = stop
        return left


def merge_portions(portions: Iterable[Portion]) -> list[Portion]:
    """Merge portions of the same tokens whose layers are contiguous: fewer, larger transfers."""
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
    """Group sorted layer indices into half-open ranges."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs


@dataclass(frozen=True, slots=True)
class InstancePair:
    """A prefill and a decode instance.

    Args:
        geometry: geometry of the model's KV.
        writers, readers: shards of all prefill ranks, and of all decode ranks.
    """

    geometry: KVGeometry
    writers: tuple[KVShardSpec, ...]
    readers: tuple[KVShardSpec, ...]


def plan_push(pair: InstancePair, writer: int, movement: BlockTransfer) -> list[PeerSpans]:
    """Plan the writes of one prefill rank.

    Args:
        pair: both instances.
        writer: index of the prefill rank that plans.
        movement: the transfer; ``local`` is the writer's side, and ``layers`` None means all.

    Returns:
        Spans per decode rank that receives anything from this writer.

    Raises:
        PlanError: the block tables are too short, or the writers don't hold what a reader needs.
    """
    shards = [spec.shard for spec in pair.writers]
    swapped = replace(
        movement, local_blocks=movement.remote_blocks, remote_blocks=movement.local_blocks
    )
    plans = []
    for reader, spec in enumerate(pair.readers):
        if writer not in elect_sources(spec.shard, shards, movement.spread):
            continue
        for plan in plan_transfer(pair.geometry, spec, pair.writers, swapped):
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
    """Compute how many bytes each (writer rank, reader rank) pair has to move for the tokens
    ``[tokens[0], tokens[1])`` of a prompt that ends there, in all layers. Tokens are moved in whole
    units, so every unit that contains one of these tokens counts.

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
