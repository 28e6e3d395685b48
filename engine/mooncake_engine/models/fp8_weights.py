"""Linear layers whose fp8 weights are kept and multiplied as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from mooncake_engine.models.layers import LinearSource, ParallelContext, Span, WeightShard
from mooncake_engine.models.quantization_config import Fp8Config
from mooncake_hal.fp8_linear import FP8_BLOCK, FP8_MULTIPLE, Fp8LinearOps, Fp8Weight

logger = logging.getLogger(__name__)


class Fp8Linears:
    """``LinearQuantization`` of a checkpoint, on ops that multiply fp8.

    Args:
        config: the checkpoint's.
    """

    def __init__(self, config: Fp8Config) -> None:
        self._config = config
        self._has_warned = False

    def make(
        self,
        parallel: ParallelContext,
        sources: Sequence[LinearSource],
        in_features: int,
        columns: Span,
    ) -> Fp8LinearWeight | None:
        """None where the checkpoint has it unquantised, or where a rank's part does not begin and
        end with blocks, or is of a size that the ops don't take: it is dequantised."""
        if any(self._config.is_ignored(source.name) for source in sources):
            return None
        rows = sum(len(source.rows) for source in sources)
        fits = rows % FP8_MULTIPLE == len(columns) % FP8_MULTIPLE == 0
        if self._config.is_blockwise:
            fits = fits and _is_of_blocks(sources, in_features, columns)
        if not fits:
            self._warn(sources[0].name)
            return None
        return Fp8LinearWeight(self._config, parallel, sources, in_features, columns)

    def _warn(self, name: str) -> None:
        if not self._has_warned:
            logger.warning(
                "some fp8 weights are dequantised while they are loaded, %s the first: a rank's "
                "part of them is not whole blocks, or no multiple of %d; other --tp-size may help",
                name,
                FP8_MULTIPLE,
            )
        self._has_warned = True


def _is_of_blocks(sources: Sequence[LinearSource], in_features: int, columns: Span) -> bool:
    """Whether the parts that are stacked are whole blocks, but for the end of the last one."""
    *inner, last = sources
    starts = [source.rows.start for source in sources] + [columns.start]
    stops = [source.rows.stop for source in inner]
    if last.rows.stop < last.out_features:
        stops.append(last.rows.stop)
    if columns.stop < in_features:
        stops.append(columns.stop)
    return not any(edge % FP8_BLOCK for edge in (*starts, *stops))


class Fp8LinearWeight:
    """A rank's part of a weight, several checkpoint linears stacked.

    Args:
        config: the checkpoint's.
        parallel: where it lives; its ops multiply fp8.
        sources: the checkpoint's linears, with this rank's rows of each.
        in_features: columns of the whole weight.
        columns: those of this rank.
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
        self._ops = cast(Fp8LinearOps, parallel.ops)
        self._sources = sources
        self._in_features = in_features
        self._columns = columns
        rows, float32 = sum(len(source.rows) for source in sources), torch.float32
        values = parallel.empty(rows, len(columns), dtype=torch.float8_e4m3fn)
        shape = (_blocks(rows), _blocks(len(columns))) if config.is_blockwise else (rows,)
        self._weight = Fp8Weight(values, parallel.empty(*shape, dtype=float32))
        inputs = len(sources) if config.has_input_scales else 0
        self._input_scales = parallel.empty(inputs, dtype=float32)

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        start, first_column = 0, self._columns.start
        for index, source in enumerate(self._sources):
            stop, first = start + len(source.rows), source.rows.start
            shape = (source.out_features, self._in_features)
            values = self._weight.values[start:stop]
            yield WeightShard(f"{source.name}.weight", values, shape, (first, first_column))
            name = f"{source.name}.{self._config.scale_name}"
            if self._config.is_blockwise:
                scales = self._weight.scales[start // FP8_BLOCK : _blocks(stop)]
                whole = (_blocks(shape[0]), _blocks(shape[1]))
                offset = (first // FP8_BLOCK, first_column // FP8_BLOCK)
                yield WeightShard(name, scales, whole, offset)
            else:
                scales = self._weight.scales[start:stop]
                yield WeightShard(name, scales, shape[:1], (first,), is_scale_of_rows=True)
            if len(self._input_scales):
                scale = self._input_scales[index : index + 1]
                name = f"{source.name}.input_scale"
                yield WeightShard(name, scale, (1,), (0,), is_scale_of_rows=True)
            start = stop

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the backend's form; of several inputs' scales, which divide
        the same input, the largest is right for all."""
        largest = self._input_scales.max() if len(self._input_scales) else None
        weight = Fp8Weight(self._weight.values, self._weight.scales, largest)
        self._weight = self._ops.pack_fp8_weight(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens, in] to [tokens, out]."""
        return self._ops.fp8_linear(x, self._weight, bias)


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)
