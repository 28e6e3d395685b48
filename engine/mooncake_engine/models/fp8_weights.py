"""Linear layers and experts with fp8 weights: those of the checkpoint as they are, or unquantised
ones that are quantised while they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from mooncake_engine.models.layers import (
    LinearSource,
    MoveExperts,
    ParallelContext,
    Span,
    WeightShard,
    linear_sources,
)
from mooncake_engine.models.quantization_config import Fp8Config
from mooncake_hal.fp8_linear import (
    FP8_BLOCK,
    FP8_MULTIPLE,
    FP8_TINY,
    Fp8ExpertOps,
    Fp8LinearOps,
    Fp8Weight,
)

logger = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_CHUNK_BYTES = 32 << 20
"""The most bytes of float32 that are quantised at once."""
_NOT_WHOLE_BLOCKS = (
    f"a rank's part of them is not whole blocks, or not a multiple of {FP8_MULTIPLE}; another "
    "--tp-size may help, or --ep-size for experts"
)


class Fp8Linears:
    """The ``LinearQuantization`` of a model in fp8, for ops that multiply fp8.

    Args:
        config: how the checkpoint is quantised.
        keeps_experts: whether the ops are also ``Fp8ExpertOps`` and experts stay in fp8.
    """

    def __init__(self, config: Fp8Config, *, keeps_experts: bool = False) -> None:
        self._config = config
        self._keeps_experts = keeps_experts
        self._has_warned = False

    def make_linear(
        self,
        parallel: ParallelContext,
        sources: Sequence[LinearSource],
        in_features: int,
        columns: Span,
    ) -> Fp8LinearWeight | None:
        """See ``LinearQuantization``. None if the checkpoint has the layer unquantised, if a rank's
        part does not begin and end at block boundaries, or if the ops don't support its size. The
        weight is then dequantised, or stays unquantised."""
        if any(self._config.is_ignored(source.name) for source in sources):
            return None
        rows = sum(len(source.rows) for source in sources)
        fits = rows % FP8_MULTIPLE == len(columns) % FP8_MULTIPLE == 0
        if self._config.is_blockwise:
            fits = fits and _is_of_blocks(sources, in_features, columns)
        if not fits:
            self._warn(sources[0].name, _NOT_WHOLE_BLOCKS)
            return None
        return Fp8LinearWeight(self._config, parallel, sources, in_features, columns)

    def make_experts(
        self,
        parallel: ParallelContext,
        names: Sequence[tuple[str, str, str]],
        held: Sequence[int],
        shape: tuple[int, int],
    ) -> Fp8Experts | None:
        """See ``LinearQuantization``. None also if a rank's slice of the inner dimension is not
        whole blocks, as gate and up are stacked in one weight."""
        linears = [name for each in names for name in each]
        ignored = [name for name in linears if self._config.is_ignored(name)]
        if not self._keeps_experts or ignored:
            if self._keeps_experts and len(ignored) < len(linears):
                self._warn(names[0][0], f"{ignored[0]} of the same layer is not quantised")
            return None
        hidden, inner = shape
        multiple = FP8_BLOCK if self._config.is_blockwise else FP8_MULTIPLE
        if inner % (multiple * parallel.expert_sharers) or hidden % FP8_MULTIPLE:
            self._warn(names[0][0], _NOT_WHOLE_BLOCKS)
            return None
        return Fp8Experts(self._config, parallel, [names[expert] for expert in held], shape)

    def _warn(self, name: str, reason: str) -> None:
        if not self._has_warned:
            what = "some fp8 weights are dequantised while they are loaded"
            if self._config.is_made_on_load:
                what = "some weights are not quantised"
            logger.warning("%s, the first is %s: %s", what, name, reason)
        self._has_warned = True


def _is_of_blocks(sources: Sequence[LinearSource], in_features: int, columns: Span) -> bool:
    """Whether the stacked parts consist of whole blocks, except at the end of the last one."""
    *inner, last = sources
    starts = [source.rows.start for source in sources] + [columns.start]
    stops = [source.rows.stop for source in inner]
    if last.rows.stop < last.out_features:
        stops.append(last.rows.stop)
    if columns.stop < in_features:
        stops.append(columns.stop)
    return not any(edge % FP8_BLOCK for edge in (*starts, *stops))


class Fp8LinearWeight:
    """A ``LinearWeight`` in fp8: one or several checkpoint linears, stacked.

    Args:
        config: how the checkpoint is quantised.
        parallel: the parallel context of the rank; its ops multiply fp8.
        sources: the checkpoint's linears, with this rank's rows of each.
        in_features: columns of the whole weight.
        columns: the columns that this rank holds.
    """

    def __init__(
        self,
        config: Fp8Config,
        parallel: ParallelContext,
        sources: Sequence[LinearSource],
        in_features: int,
        columns: Span,
    ) -> None:
        self._config = config
        self._dtype = parallel.dtype
        self._ops = cast(Fp8LinearOps, parallel.ops)
        self._sources = sources
        self._in_features = in_features
        self._columns = columns
        rows = sum(len(source.rows) for source in sources)
        self._weight = _empty_weight(config, parallel, rows, len(columns))
        inputs = len(sources) if config.has_input_scales else 0
        self._input_scales = parallel.empty(inputs, dtype=torch.float32)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        columns = self._in_features, self._columns
        yield from _shards(self._config, self._dtype, self._weight, self._sources, columns)
        for source, scale in zip(self._sources, self._input_scales.unsqueeze(1), strict=False):
            name = f"{source.name}.input_scale"
            yield WeightShard(name, scale, (1,), (0,), is_scale_of_rows=True)

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout. The stacked linears have the same
        input, so the largest of their input scales is used for all of them."""
        largest = self._input_scales.max() if len(self._input_scales) else None
        weight = Fp8Weight(self._weight.values, self._weight.scales, largest)
        self._weight = self._ops.pack_fp8_weight(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens, in] to [tokens, out]."""
        return self._ops.fp8_linear(x, self._weight, bias)


class Fp8Experts:
    """A rank's part of a layer's experts, in fp8.

    Args:
        config: how the checkpoint is quantised.
        parallel: the parallel context of the rank; its ops multiply fp8 experts.
        names: names of gate, up and down of this rank's experts.
        shape: hidden and inner size, on all ranks together.
    """

    def __init__(
        self,
        config: Fp8Config,
        parallel: ParallelContext,
        names: Sequence[tuple[str, str, str]],
        shape: tuple[int, int],
    ) -> None:
        self._config = config
        self._dtype = parallel.dtype
        self._ops = cast(Fp8ExpertOps, parallel.ops)
        self._names = names
        self._shape = hidden, inner = shape
        self._share = share = parallel.inner_share(inner)
        count, width = len(names), len(share)
        self._weights = {
            "gate_up": _empty_weight(config, parallel, count, 2 * width, hidden),
            "down": _empty_weight(config, parallel, count, hidden, width),
        }

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        hidden, inner = self._shape
        shards = partial(_shards, self._config, self._dtype)
        share, everything = self._share, Span(0, hidden)
        gate_up, down = self._weights["gate_up"], self._weights["down"]
        for expert, (*gated, last) in enumerate(self._names):
            sources = linear_sources(gated, (inner, inner), (share, share))
            yield from shards(_of_expert(gate_up, expert), sources, (hidden, everything))
            sources = linear_sources((last,), (hidden,), (everything,))
            yield from shards(_of_expert(down, expert), sources, (inner, share))

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        for name in self._weights:
            self._weights[name] = self._ops.pack_fp8_experts(self._weights[name])

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the weighted sums, [tokens, hidden]; see ``Ops.moe``."""
        return self._ops.fp8_moe(x, self._weights["gate_up"], self._weights["down"], ids, weights)

    def exchange(self, moved: MoveExperts) -> None:
        """Replace some of the experts, with their scales; see ``MoveExperts``."""
        for name in tuple(self._weights):
            weight = self._ops.unpack_fp8_experts(self._weights.pop(name))
            # not all collectives support e4m3
            for part in (weight.values.view(torch.uint8), weight.scales):
                experts, arrived = moved(part)
                part[experts] = arrived
            self._weights[name] = self._ops.pack_fp8_experts(weight)


def _empty_weight(config: Fp8Config, parallel: ParallelContext, *shape: int) -> Fp8Weight:
    """Allocate a weight of shape [out, in] or [experts, out, in]."""
    *experts, rows, columns = shape
    scales = (_blocks(rows), _blocks(columns)) if config.is_blockwise else (rows,)
    values = parallel.empty(*shape, dtype=torch.float8_e4m3fn)
    return Fp8Weight(values, parallel.empty(*experts, *scales, dtype=torch.float32))


def _of_expert(weight: Fp8Weight, expert: int) -> Fp8Weight:
    return Fp8Weight(weight.values[expert], weight.scales[expert])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizingShard(WeightShard):
    """A shard that is quantised while it is loaded, each row by its own largest element.

    Args:
        scales: [rows] float32, filled with the scales of the rows.
        plain_dtype: the type to read the checkpoint tensor in.
    """

    scales: Tensor
    plain_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.plain_dtype

    def fill(self, values: Tensor) -> None:
        """Quantise and copy the values, some rows at a time, so that only these are on the device
        unquantised."""
        step = max(1, _CHUNK_BYTES // (4 * values.shape[1]))
        chunks = (torch.split(part, step) for part in (values, self.target, self.scales))
        for rows, target, scales in zip(*chunks, strict=True):
            wide = rows.to(target.device).float()
            scales.copy_(wide.abs().amax(1).clamp(min=FP8_TINY) / _LARGEST)
            target.copy_((wide / scales.unsqueeze(1)).clamp(-_LARGEST, _LARGEST))


def _shards(
    config: Fp8Config,
    dtype: torch.dtype,
    weight: Fp8Weight,
    sources: Sequence[LinearSource],
    columns: tuple[int, Span],
) -> Iterator[WeightShard]:
    """The shards that fill a weight of stacked linears.

    Args:
        config: how the checkpoint is quantised.
        dtype: type in which unquantised weights are read.
        weight: the weight to fill.
        sources: the checkpoint's linears, with this rank's rows of each.
        columns: the number of columns, and those that this rank holds.
    """
    in_features, own = columns
    start = 0
    for source in sources:
        stop, first = start + len(source.rows), source.rows.start
        shape = (source.out_features, in_features)
        values = weight.values[start:stop]
        name, offset = f"{source.name}.weight", (first, own.start)
        scale_name = f"{source.name}.{config.scale_name}"
        if config.is_made_on_load:
            scales = weight.scales[start:stop]
            yield QuantizingShard(name, values, shape, offset, scales=scales, plain_dtype=dtype)
        else:
            yield WeightShard(name, values, shape, offset)
        if weight.is_blockwise:
            scales = weight.scales[start // FP8_BLOCK : _blocks(stop)]
            whole = (_blocks(shape[0]), _blocks(shape[1]))
            offset = (first // FP8_BLOCK, own.start // FP8_BLOCK)
            yield WeightShard(scale_name, scales, whole, offset)
        elif not config.is_made_on_load:
            scales = weight.scales[start:stop]
            yield WeightShard(scale_name, scales, shape[:1], (first,), is_scale_of_rows=True)
        start = stop


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)
