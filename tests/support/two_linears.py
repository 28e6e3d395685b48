"""The smallest model that loads and divides like any other: a fused linear, a row-parallel one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mooncake_engine.models.layers import (
    ColumnLinear,
    ParallelContext,
    RowLinear,
    WeightShard,
    linear_sources,
)


class TwoLinears:
    """A fused linear, and one whose columns are divided, ``down``.

    Args:
        parallel: parallel context of both.
        rows: of each part of the fused linear, by name.
        down: rows and columns of the other one; the fused one has as many columns as it has rows.
        is_ignored: which additional tensors a checkpoint may have.
        has_bias: whether the fused linear has biases.
    """

    tied_head = None

    def __init__(
        self,
        parallel: ParallelContext,
        rows: Mapping[str, int],
        down: tuple[int, int],
        is_ignored: Callable[[str], bool],
        *,
        has_bias: bool = False,
    ) -> None:
        shares = [parallel.share(count) for count in rows.values()]
        sources = linear_sources(list(rows), list(rows.values()), shares)
        self.fused = ColumnLinear(parallel, sources, down[0], has_bias=has_bias)
        self.divided = RowLinear(parallel, "down", parallel.share(down[1]), down)
        self.is_ignored = is_ignored

    def weight_shards(self) -> Iterator[WeightShard]:
        """The weight shards to load."""
        yield from self.fused.weight_shards()
        yield from self.divided.weight_shards()

    def process_weights_after_loading(self) -> None:
        """As of ``Model``."""
        self.fused.process_weights_after_loading()
        self.divided.process_weights_after_loading()
