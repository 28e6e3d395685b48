"""Linear layers, embedding, head and norms, whole or split over tensor-parallel ranks.

Every layer lists the parts of checkpoint tensors that it needs as ``WeightShard``s. The weight
loader fills them, and ``process_weights_after_loading`` then converts the weights to the backend's
layout.
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

MoveExperts = Callable[[Tensor], tuple[list[int], Tensor]]
"""Moves experts between ranks. It is called with each tensor of a rank's experts, [experts, ...],
in the same order on every rank; returns the indexes of the experts to replace, and their values."""


class LinearWeight(Protocol):
    """A rank's part of the weight of a linear layer, quantised or not."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        ...

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map [tokens, in] to [tokens, out]."""
        ...


class ExpertWeights(Protocol):
    """A rank's part of a layer's experts, quantised or not."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        ...

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the weighted sums, [tokens, hidden]; see ``Ops.moe``."""
        ...

    def exchange(self, moved: MoveExperts) -> None:
        """Replace some of the experts, with their scales; see ``MoveExperts``."""
        ...


class LinearQuantization(Protocol):
    """Makes the quantised weights of a model's linear layers and experts."""

    def make_linear(
        self,
        parallel: ParallelContext,
        sources: Sequence[LinearSource],
        in_features: int,
        columns: Span,
    ) -> LinearWeight | None:
        """Make the weight of a linear layer; None if it is not quantised, or can't be divided over
        the ranks while it is.

        Args:
            parallel: the parallel context of the rank.
            sources: the checkpoint's linears, with this rank's rows of each.
            in_features: columns of the whole weight.
            columns: the columns that this rank holds.
        """
        ...

    def make_experts(
        self,
        parallel: ParallelContext,
        names: Sequence[tuple[str, str, str]],
        held: Sequence[int],
        shape: tuple[int, int],
    ) -> ExpertWeights | None:
        """Make the experts of a layer; None if some are not quantised, or can't be divided over the
        ranks while they are. The result is None on all ranks or on none.

        Args:
            parallel: the parallel context of the rank.
            names: names of gate, up and down of every expert.
            held: the experts that this rank holds, in order.
            shape: hidden and inner size, on all ranks together.
        """
        ...


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """A rank's place in the parallel layout of a model: its share of the weights, its groups, and
    its device.

    Args:
        ops: kernels of the device.
        device, dtype: device and type of weights and activations.
        communicator: the rank's tensor-parallel group; None if it has a single rank.
        layers: the layers of the rank's pipeline stage; None for all layers.
        kv_scales: scales of both planes of each of the model's layers, if KV is stored in a
            narrower type.
        has_native_latents: whether latents are kept in the layout that the ops read best.
        ep_size: the number of parts that experts are divided into. Each part has whole experts,
            sliced over the part's ranks. With 1, every tensor-parallel rank has a slice of every
            expert.
        ep_dispatch_min_tokens: the fewest tokens of a step that are dispatched to experts; smaller
            steps run on every rank.
        expert_slots: by layer, the expert in each slot; empty if every expert has one, in order.
        expert_communicator: all ranks that experts are divided over, in order of data-parallel
            ranks; None if those are the tensor-parallel group.
        fused_experts: the backend's fused ops for experts of all these ranks; None if it has none.
        fused_max_tokens: the most tokens of a rank in one call of ``fused_experts``.
        quantization: makes the weights that the checkpoint has quantised and the ops can multiply
            as they are; None to dequantise all weights while they are loaded.
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
    fused_max_tokens: int = 0
    quantization: LinearQuantization | None = None
    fused_rope_writes: bool = False

    def attention_ops(self, layer: int) -> Ops:
        """The ops that read and write a layer's KV."""
        if not self.kv_scales:
            return self.ops
        return cast(ScaledKVOps, self.ops).with_kv_scales(*self.kv_scales[layer])

    def rope_write_ops(self, layer: int) -> RopeWriteOps:
        """The ops for norms, rotation and the write of a layer's KV: fused, or composed."""
        ops = self.attention_ops(layer)
        return cast(RopeWriteOps, ops) if self.fused_rope_writes else ComposedRopeWrites(ops)

    def latent_ops(self, layer: int) -> LatentOps:
        """The ops that read and write a layer's latents."""
        if not self.has_native_latents:
            return self.attention_ops(layer)
        return cast(NativeLatentOps, self.ops).with_native_latents()

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank."""
        return self.communicator.rank if self.communicator else 0

    @property
    def tp_size(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.communicator.world_size if self.communicator else 1

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor on the rank's device, by default of the rank's dtype."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """A tensor of zeros, on the rank's device and of its dtype."""
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def share(self, total: int) -> Span:
        """This rank's half-open part of ``range(total)``; sizes differ by at most one."""
        return share_of(total, self.tp_rank, self.tp_size)

    def expert_share(self, num_slots: int) -> Span:
        """The expert slots that this rank holds, whole or a slice of each."""
        rank, ranks = self._expert_rank
        return share_of(num_slots, rank * self.ep_size // ranks, self.ep_size)

    def inner_share(self, inner: int) -> Span:
        """The slice of an expert's inner dimension that this rank holds."""
        sharers = self.expert_sharers
        return share_of(inner, self._expert_rank[0] % sharers, sharers)

    @property
    def expert_sharers(self) -> int:
        """The number of ranks that hold the same experts, each a slice of them."""
        return self._expert_rank[1] // self.ep_size

    @property
    def _expert_rank(self) -> tuple[int, int]:
        """This rank's number among those that experts are divided over, and how many they are."""
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
    """Part ``index`` of ``range(total)`` divided into ``parts``; sizes differ by at most one."""
    return Span(index * total // parts, (index + 1) * total // parts)


@dataclass(frozen=True, slots=True, eq=False)
class WeightShard:
    """A part of one checkpoint tensor, and the memory to load it to.

    Args:
        name: name of the tensor in the checkpoint.
        target: the memory to fill; a view of the parameter.
        full_shape: shape of the whole tensor in the checkpoint.
        offset: where ``target`` begins in the tensor, per dimension.
        is_scale_of_rows: whether the tensor has one scale per row, [rows]; the checkpoint may also
            have a single scale for all rows, or store them as a column.
    """

    name: str
    target: Tensor
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_scale_of_rows: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type to read the tensor in."""
        return self.target.dtype

    def fill(self, values: Tensor) -> None:
        """Copy the values that were read, which are in host memory, to the target."""
        self.target.copy_(values)


@dataclass(frozen=True, slots=True)
class LinearSource:
    """A linear of the checkpoint of which a fused layer holds some rows.

    Args:
        name: prefix of ``.weight`` and ``.bias``.
        out_features: number of its rows, on all ranks together.
        rows: the rows that this rank holds.
    """

    name: str
    out_features: int
    rows: Span


def linear_sources(
    names: Sequence[str], totals: Sequence[int], rows: Sequence[Span]
) -> tuple[LinearSource, ...]:
    """The sources of a fused layer.

    Args:
        names: names of the checkpoint's linears; all the same if the checkpoint has them fused too,
            one after another.
        totals: number of rows of each, on all ranks together.
        rows: the rows of each that this rank holds.
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
    """Each source with its rows of the stacked tensor."""
    yield from zip(sources, torch.split(stacked, [len(s.rows) for s in sources]), strict=True)


class DenseWeight:
    """A ``LinearWeight`` in the model's dtype: one or several checkpoint linears, stacked.

    Args:
        parallel: the parallel context of the rank.
        sources: the checkpoint's linears, with this rank's rows of each.
        in_features: columns of the whole weight.
        columns: the columns that this rank holds.
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
        """The parts of checkpoint tensors to load."""
        for source, rows in _by_source(self._sources, self.values):
            shape = (source.out_features, self._in_features)
            offset = (source.rows.start, self._first_column)
            yield WeightShard(f"{source.name}.weight", rows, shape, offset)

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout."""
        self.values = self._ops.pack_weight(self.values)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map [tokens, in] to [tokens, out]."""
        return self._ops.linear(x, self.values, bias)


def make_linear_weight(
    parallel: ParallelContext, sources: Sequence[LinearSource], in_features: int, columns: Span
) -> LinearWeight:
    """Make a rank's part of the weight of a linear layer, quantised if the model asks for it."""
    if parallel.quantization is not None:
        made = parallel.quantization.make_linear(parallel, sources, in_features, columns)
        if made is not None:
            return made
    return DenseWeight(parallel, sources, in_features, columns)


class ColumnLinear:
    """``x @ W.T + b`` with the output features split over ranks; may stack several checkpoint
    linears."""

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
        """The weight of an unquantised layer before it is packed, [rows of this rank, in]."""
        assert isinstance(self._weight, DenseWeight)
        return self._weight.values

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield from self._weight.weight_shards()
        if self.bias is not None:
            for source, rows in _by_source(self._sources, self.bias):
                shape, offset = (source.out_features,), (source.rows.start,)
                yield WeightShard(f"{source.name}.bias", rows, shape, offset)

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout."""
        self._weight.process_weights_after_loading()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, in] to [tokens, rows of this rank]."""
        return self._weight(x, self.bias)


class RowLinear:
    """``x @ W.T + b`` with the input features split over ranks, and partial sums all-reduced."""

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
        # only one rank adds the bias, so that the sum over ranks contains it once
        adds_bias = has_bias and parallel.tp_rank == 0
        self._bias = parallel.empty(out_features) if adds_bias else None

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield from self._weight.weight_shards()
        if self._bias is not None:
            shape = tuple(self._bias.shape)
            yield WeightShard(f"{self._name}.bias", self._bias, shape, (0,))

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout."""
        self._weight.process_weights_after_loading()

    def partial(self, x: Tensor) -> Tensor:
        """This rank's partial sum of the output, before the all-reduce."""
        return self._weight(x, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, columns of this rank] to [tokens, out]."""
        return self.reduce(self.partial(x))

    def reduce(self, partial: Tensor) -> Tensor:
        """All-reduce the ranks' partial sums to the output."""
        return self._communicator.all_reduce(partial) if self._communicator else partial


class VocabTable:
    """The rows of a [vocab, hidden] matrix, split over ranks: an embedding, a head, or both.

    Every rank holds ``ceil(vocab / ranks)`` rows, padded with zeros on the last ranks, so that all
    ranks gather logits of equal width.
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
        """The part of the checkpoint tensor to load. Also zeroes the padding."""
        shard = self.shard_of(self._name)
        self.weight[len(shard.target) :].zero_()
        yield shard

    def shard_of(self, name: str) -> WeightShard:
        """This rank's rows of the checkpoint matrix ``name``."""
        held = min(self._rows, self._vocab_size - self._first)
        shape = (self._vocab_size, self.weight.shape[1])
        return WeightShard(f"{name}.weight", self.weight[:held], shape, (self._first, 0))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Map token ids, [tokens] int64, to [tokens, hidden]."""
        communicator = self._parallel.communicator
        if communicator is None:
            return embedding(token_ids, self.weight)
        local = token_ids - self._first
        is_foreign = (local < 0) | (local >= self._rows)
        rows = embedding(local.masked_fill(is_foreign, 0), self.weight)
        return communicator.all_reduce(rows.masked_fill_(is_foreign.unsqueeze(-1), 0))


class Head:
    """Computes logits from hidden rows.

    Args:
        parallel: the parallel context of the rank.
        table: the weights, which may be those of the embedding.
        vocab_size: number of logits per row, on all ranks together.
    """

    def __init__(self, parallel: ParallelContext, table: VocabTable, vocab_size: int) -> None:
        self._parallel = parallel
        self._vocab_size = vocab_size
        self._weight = table.weight

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout. A tied embedding keeps its own."""
        self._weight = self._parallel.ops.pack_weight(self._weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden] to [rows, vocab], in the model's dtype, the same on every rank."""
        logits = self._parallel.ops.linear(hidden, self._weight, None)
        communicator = self._parallel.communicator
        if communicator is None:
            return logits
        return communicator.all_gather(logits)[:, : self._vocab_size]


class Norm:
    """An RMS norm, whose weight is replicated on every rank."""

    def __init__(self, parallel: ParallelContext, name: str, size: int, eps: float) -> None:
        self._ops = parallel.ops
        self._name = name
        self.eps = eps
        self.weight = parallel.empty(size)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield WeightShard(f"{self._name}.weight", self.weight, tuple(self.weight.shape), (0,))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
