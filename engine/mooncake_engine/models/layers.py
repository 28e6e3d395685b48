"""Linear layers, embedding and head, whole or split over tensor-parallel ranks.

Every layer names the checkpoint tensors that it wants as ``WeightShard``s; loading copies into
them, ``process_weights_after_loading`` then brings weights into the backend's own form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from mooncake_hal.backend import Communicator, Ops, ScaledKVOps
from mooncake_hal.fused_experts import FusedExperts
from mooncake_hal.latents import LatentOps, NativeLatentOps
from mooncake_hal.rope_writes import ComposedRopeWrites, RopeWriteOps

MovedExperts = Callable[[Tensor], tuple[list[int], Tensor]]
"""Gets [experts, ...] that there is of a rank's experts, one tensor after the other, the same ones
on every rank; returns which experts are others now, and what there is of those."""


class LinearWeight(Protocol):
    """A rank's part of a linear layer's weight, quantised or not."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        ...

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the backend's form."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens, in] to [tokens, out]."""
        ...


class ExpertWeights(Protocol):
    """A rank's part of a layer's experts, quantised or not."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        ...

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weights into the backend's form."""
        ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the weighted sums of [tokens, hidden]; see ``Ops.moe``."""
        ...

    def exchange(self, moved: MovedExperts) -> None:
        """Replace some of the experts, see ``MovedExperts``; scales move as weights do."""
        ...


class LinearQuantization(Protocol):
    """How the weights of a model's linear layers, and of its experts, are quantised."""

    def make_linear(
        self,
        parallel: ParallelContext,
        sources: Sequence[LinearSource],
        in_features: int,
        columns: Span,
    ) -> LinearWeight | None:
        """The weight of a layer; None if it is not quantised, or can't be divided so.

        Args:
            parallel: where it lives.
            sources: the checkpoint's linears, with this rank's rows of each.
            in_features: columns of the whole weight.
            columns: those of this rank.
        """
        ...

    def make_experts(
        self,
        parallel: ParallelContext,
        names: Sequence[tuple[str, str, str]],
        held: Sequence[int],
        shape: tuple[int, int],
    ) -> ExpertWeights | None:
        """A layer's experts; None if some are not quantised, or can't be divided so. All ranks get
        the same answer.

        Args:
            parallel: where they live.
            names: of gate, up and down of every expert.
            held: those of this rank, in order.
            shape: hidden and inner size, all ranks together.
        """
        ...


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Where a rank's share of a model lives.

    Args:
        ops: kernels of the device.
        device, dtype: of weights and activations.
        communicator: the rank's tensor-parallel group, or None for a rank alone.
        expert_communicator: all ranks that experts are divided over, data-parallel rank after
            data-parallel rank; None if those are the tensor-parallel group.
        layers: those of the rank's pipeline stage; None for all.
        kv_scales: of both planes of each of the model's layers, if KV is kept in a narrower type.
        has_native_latents: whether latents are kept in the form that the ops read best.
        ep_size: parts that these ranks have experts in: each part has some of them whole, sliced
            over the part's ranks. 1: every tensor-parallel rank has a slice of every expert.
        ep_dispatch_min_tokens: of steps whose tokens are dispatched to experts; smaller ones run on
            every rank.
        expert_slots: by layer, the expert in each slot; empty: every expert has one, in order.
        fused_experts: the backend's own ops for experts of all these ranks, if it has such.
        fused_most_tokens: of a rank in one call of them.
        quantization: has the weights of linear layers and experts that the checkpoint has
            quantised and the ops multiply so; None: all are dequantised as they are loaded.
        fused_rope_writes: whether the ops are also ``RopeWriteOps``.
    """

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    communicator: Communicator | None = None
    layers: Span | None = None
    kv_scales: tuple[tuple[float, float], ...] = ()
    has_native_latents: bool = False
    ep_size: int = 1
    ep_dispatch_min_tokens: int = 1
    expert_slots: tuple[tuple[int, ...], ...] = ()
    expert_communicator: Communicator | None = None
    fused_experts: FusedExperts | None = None
    fused_most_tokens: int = 0
    quantization: LinearQuantization | None = None
    fused_rope_writes: bool = False

    def attention_ops(self, layer: int) -> Ops:
        """The ops for what reads and writes that layer's KV."""
        if not self.kv_scales:
            return self.ops
        return cast(ScaledKVOps, self.ops).with_kv_scales(*self.kv_scales[layer])

    def rope_write_ops(self, layer: int) -> RopeWriteOps:
        """Norms, rotation and the write of a layer's KV: fused, or by the ops for each."""
        ops = self.attention_ops(layer)
        return cast(RopeWriteOps, ops) if self.fused_rope_writes else ComposedRopeWrites(ops)

    def latent_ops(self, layer: int) -> LatentOps:
        """The same for a layer's latents."""
        if not self.has_native_latents:
            return self.attention_ops(layer)
        return cast(NativeLatentOps, self.ops).with_native_latents()

    @property
    def tp_rank(self) -> int:
        """This rank."""
        return self.communicator.rank if self.communicator else 0

    @property
    def tp_size(self) -> int:
        """Ranks in the group."""
        return self.communicator.world_size if self.communicator else 1

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory of the rank's device, and of its dtype unless told."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """Memory of the rank's device and dtype that holds zeros."""
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def share(self, total: int) -> Span:
        """This rank's half-open part of ``range(total)``; sizes differ by at most one."""
        return share_of(total, self.tp_rank, self.tp_size)

    def expert_share(self, num_slots: int) -> Span:
        """The slots for experts that this rank has, or a slice of."""
        rank, ranks = self._expert_rank
        return share_of(num_slots, rank * self.ep_size // ranks, self.ep_size)

    def inner_share(self, inner: int) -> Span:
        """The slice of an expert's inner dimension that this rank has."""
        sharers = self.expert_sharers
        return share_of(inner, self._expert_rank[0] % sharers, sharers)

    @property
    def expert_sharers(self) -> int:
        """Ranks that have the same experts, a slice of each."""
        return self._expert_rank[1] // self.ep_size

    @property
    def _expert_rank(self) -> tuple[int, int]:
        """Which of the ranks that experts are divided over this is, of how many."""
        group = self.expert_communicator or self.communicator
        return (group.rank, group.world_size) if group else (0, 1)


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of rows, columns or layers."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def share_of(total: int, index: int, parts: int) -> Span:
    """One of so many parts of ``range(total)``; sizes differ by at most one."""
    return Span(index * total // parts, (index + 1) * total // parts)


@dataclass(frozen=True, slots=True, eq=False)
class WeightShard:
    """A part of one checkpoint tensor, and the memory that it is loaded to.

    Args:
        name: its name in the checkpoint.
        target: what to fill; a view of the parameter.
        full_shape: the whole tensor's shape in the checkpoint.
        offset: where ``target`` begins in it, per dimension.
        is_scale_of_rows: whether it is [rows], and the checkpoint may have it with one element for
            all of them, or as a column.
    """

    name: str
    target: Tensor
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_scale_of_rows: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What it is read in."""
        return self.target.dtype

    def fill(self, values: Tensor) -> None:
        """Take what was read, in host memory."""
        self.target.copy_(values)


@dataclass(frozen=True, slots=True)
class LinearSource:
    """One checkpoint linear of which a fused layer takes some rows.

    Args:
        name: prefix of ``.weight`` and ``.bias``.
        out_features: its rows, all ranks together.
        rows: those of this rank.
    """

    name: str
    out_features: int
    rows: Span


def linear_sources(
    names: Sequence[str], totals: Sequence[int], rows: Sequence[Span]
) -> tuple[LinearSource, ...]:
    """The sources of a fused layer.

    Args:
        names: of the checkpoint's linears; all the same where the checkpoint has them fused, too,
            one behind the other.
        totals: rows of each, all ranks together.
        rows: this rank's of each.
    """
    if len({*names}) == len(names):
        return tuple(LinearSource(*each) for each in zip(names, totals, rows, strict=True))
    starts = accumulate(totals, initial=0)
    return tuple(
        LinearSource(name, sum(totals), Span(start + own.start, start + own.stop))
        for name, start, own in zip(names, starts, rows, strict=False)
    )


def _by_source(
    sources: Sequence[LinearSource], stacked: Tensor
) -> Iterator[tuple[LinearSource, Tensor]]:
    """Each source with its rows of what they are stacked in."""
    yield from zip(sources, torch.split(stacked, [len(s.rows) for s in sources]), strict=True)


class DenseWeight:
    """``LinearWeight`` in the model's dtype, several checkpoint linears stacked.

    Args:
        parallel: where it lives.
        sources: the checkpoint's linears, with this rank's rows of each.
        in_features: columns of the whole weight.
        columns: those of this rank.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        sources: Sequence[LinearSource],
        in_features: int,
        columns: Span,
    ) -> None:
        self._ops = parallel.ops
        self._sources = sources
        self._in_features = in_features
        self._first_column = columns.start
        self.values = parallel.empty(sum(len(s.rows) for s in sources), len(columns))

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        for source, rows in _by_source(self._sources, self.values):
            shape = (source.out_features, self._in_features)
            offset = (source.rows.start, self._first_column)
            yield WeightShard(f"{source.name}.weight", rows, shape, offset)

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the backend's form."""
        self.values = self._ops.pack_weight(self.values)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens, in] to [tokens, out]."""
        return self._ops.linear(x, self.values, bias)


def make_linear_weight(
    parallel: ParallelContext, sources: Sequence[LinearSource], in_features: int, columns: Span
) -> LinearWeight:
    """A rank's part of a linear layer's weight, quantised where the model says so."""
    if parallel.quantization is not None:
        made = parallel.quantization.make_linear(parallel, sources, in_features, columns)
        if made is not None:
            return made
    return DenseWeight(parallel, sources, in_features, columns)


class ColumnLinear:
    """``x @ W.T + b`` with output rows split over ranks; several checkpoint linears stacked."""

    def __init__(
        self,
        parallel: ParallelContext,
        sources: tuple[LinearSource, ...],
        in_features: int,
        *,
        has_bias: bool = False,
    ) -> None:
        self._sources = sources
        self._weight = make_linear_weight(parallel, sources, in_features, Span(0, in_features))
        rows = sum(len(source.rows) for source in sources)
        self.bias = parallel.empty(rows) if has_bias else None

    @property
    def dense_rows(self) -> Tensor:
        """[rows of this rank, in], before they are packed; of a layer that is not quantised."""
        assert isinstance(self._weight, DenseWeight)
        return self._weight.values

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        yield from self._weight.weight_shards()
        if self.bias is not None:
            for source, rows in _by_source(self._sources, self.bias):
                shape, offset = (source.out_features,), (source.rows.start,)
                yield WeightShard(f"{source.name}.bias", rows, shape, offset)

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the backend's form."""
        self._weight.process_weights_after_loading()

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] to [tokens, rows of this rank]."""
        return self._weight(x, self.bias)


class RowLinear:
    """``x @ W.T + b`` with input columns split over ranks and the partial sums added up."""

    def __init__(
        self,
        parallel: ParallelContext,
        name: str,
        columns: Span,
        shape: tuple[int, int],
        *,
        has_bias: bool = False,
    ) -> None:
        self._communicator = parallel.communicator
        self._name = name
        out_features, in_features = shape
        source = LinearSource(name, out_features, Span(0, out_features))
        self._weight = make_linear_weight(parallel, (source,), in_features, columns)
        # one rank adds the bias: the sum over ranks must hold it once
        adds_bias = has_bias and parallel.tp_rank == 0
        self._bias = parallel.empty(out_features) if adds_bias else None

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        yield from self._weight.weight_shards()
        if self._bias is not None:
            shape = tuple(self._bias.shape)
            yield WeightShard(f"{self._name}.bias", self._bias, shape, (0,))

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the backend's form."""
        self._weight.process_weights_after_loading()

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum that the output is."""
        return self._weight(x, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, columns of this rank] to [tokens, out]."""
        return self.reduce(self.partial(x))

    def reduce(self, partial: Tensor) -> Tensor:
        """The output, from this rank's part of its sum."""
        return self._communicator.all_reduce(partial) if self._communicator else partial


class VocabTable:
    """The rows of a [vocab, hidden] matrix, split over ranks: an embedding, a head, or both.

    Every rank holds ``ceil(vocab / ranks)`` rows, the last ones partly padding (zeros), so that
    logits of equal width can be gathered.
    """

    def __init__(
        self, parallel: ParallelContext, name: str, vocab_size: int, hidden_size: int
    ) -> None:
        self._parallel = parallel
        self._name = name
        self._vocab_size = vocab_size
        self._rows = -(-vocab_size // parallel.tp_size)
        self._first = min(self._rows * parallel.tp_rank, vocab_size)
        self.weight = parallel.empty(self._rows, hidden_size)

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load; zeroes the padding."""
        shard = self.shard_of(self._name)
        self.weight[len(shard.target) :].zero_()
        yield shard

    def shard_of(self, name: str) -> WeightShard:
        """This rank's rows, of the checkpoint's matrix of that name."""
        held = min(self._rows, self._vocab_size - self._first)
        shape = (self._vocab_size, self.weight.shape[1])
        return WeightShard(f"{name}.weight", self.weight[:held], shape, (self._first, 0))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 to [tokens, hidden]."""
        communicator = self._parallel.communicator
        if communicator is None:
            return embedding(token_ids, self.weight)
        local = token_ids - self._first
        is_foreign = (local < 0) | (local >= self._rows)
        rows = embedding(local.masked_fill(is_foreign, 0), self.weight)
        return communicator.all_reduce(rows.masked_fill_(is_foreign.unsqueeze(-1), 0))


class Head:
    """Logits from hidden rows.

    Args:
        parallel: where it lives.
        table: its weights; may be the embedding's own.
        vocab_size: columns of the logits, all ranks together.
    """

    def __init__(self, parallel: ParallelContext, table: VocabTable, vocab_size: int) -> None:
        self._parallel = parallel
        self._vocab_size = vocab_size
        self._weight = table.weight

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the backend's form; an embedding keeps the table."""
        self._weight = self._parallel.ops.pack_weight(self._weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab], in the model's dtype, the same on every rank."""
        logits = self._parallel.ops.linear(hidden, self._weight, None)
        communicator = self._parallel.communicator
        if communicator is None:
            return logits
        return communicator.all_gather(logits)[:, : self._vocab_size]


class Norm:
    """Weight of an RMS norm; replicated on every rank."""

    def __init__(self, parallel: ParallelContext, name: str, size: int, eps: float) -> None:
        self._ops = parallel.ops
        self._name = name
        self.eps = eps
        self.weight = parallel.empty(size)

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        yield WeightShard(f"{self._name}.weight", self.weight, tuple(self.weight.shape), (0,))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
