"""Which attention heads a tensor-parallel rank computes: pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_engine.errors import ConfigError
from mooncake_hal.kv.geometry import head_range


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's heads; ranges are half open and global.

    Args:
        query_start, query_stop: query heads.
        kv_start, kv_stop: the key/value heads that they look at.
    """

    query_start: int
    query_stop: int
    kv_start: int
    kv_stop: int

    @property
    def query_heads(self) -> int:
        """How many query heads."""
        return self.query_stop - self.query_start

    @property
    def kv_heads(self) -> int:
        """How many key/value heads."""
        return self.kv_stop - self.kv_start


def share_heads(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> HeadShare:
    """Heads of one rank: key/value heads as the KV's placement says, queries along with them.

    Where several ranks hold the same key/value head, its queries are divided among them, unevenly
    if need be.

    Raises:
        ConfigError: some rank would be left without a query head.
    """
    group = num_heads // num_kv_heads
    kv_start, kv_stop = head_range(num_kv_heads, tp_size, tp_rank)
    sharers = [
        rank
        for rank in range(tp_size)
        if head_range(num_kv_heads, tp_size, rank) == (kv_start, kv_stop)
    ]
    largest = max(1, -(-tp_size // num_kv_heads))
    if largest > group:
        raise ConfigError(
            f"tensor parallel over {tp_size} ranks needs {largest} query heads per key/value "
            f"head, the model has {group} ({num_heads} query, {num_kv_heads} key/value heads); "
            f"use at most {num_heads} ranks"
        )
    if len(sharers) == 1:
        return HeadShare(kv_start * group, kv_stop * group, kv_start, kv_stop)
    index, count = sharers.index(tp_rank), len(sharers)
    first = kv_start * group
    return HeadShare(
        first + index * group // count, first + (index + 1) * group // count, kv_start, kv_stop
    )
