"""Norms of queries and keys, rotation and the write of KV as one op, for backends that fuse them.

Between a layer's projection and its attention stand up to four ops, each of which reads and writes
the same few rows; on a device each is a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mooncake_hal.backend import Ops


class QKNorms(NamedTuple):
    """RMS norms of a layer's queries and keys, head by head.

    Args:
        query, key: [head_dim], the weights.
        eps: of both.
    """

    query: Tensor
    key: Tensor
    eps: float


class KVRows(NamedTuple):
    """New tokens as a layer's projection leaves them, and what becomes of their queries and keys.

    Args:
        key: [tokens, kv_heads, head_dim]; with value and query it may be a view of one tensor.
        value: [tokens, kv_heads, head_dim], may be of another width.
        positions: [tokens] int64.
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines.
        norms: before the rotation; None without.
    """

    key: Tensor
    value: Tensor
    positions: Tensor
    cos_sin: Tensor
    norms: QKNorms | None = None


class RopeWriteOps(Protocol):
    """What the ``ops`` of a backend with ``capabilities.fused_rope_writes`` also do."""

    def rope_and_write_kv(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        rows: KVRows,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,  # [tokens] int64
    ) -> Tensor:  # like query
        """Norm queries and keys where asked, rotate them, store each token's key and value in its
        slot; returns the queries.

        The same as ``rms_norm``, ``rope`` and ``write_kv`` of ``Ops`` one after the other, also in
        what is rounded: normed rows to their type before they are rotated. May work in place.
        """
        ...


class ComposedRopeWrites:
    """The same by the ops of a backend that does not fuse them.

    Args:
        ops: of the layer, scales of its KV included.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def rope_and_write_kv(
        self,
        query: Tensor,
        rows: KVRows,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        key, norms = rows.key, rows.norms
        if norms is not None:
            query = self._ops.rms_norm(query, norms.query, norms.eps)
            key = self._ops.rms_norm(key, norms.key, norms.eps)
        query, key = self._ops.rope(query, key, rows.positions, rows.cos_sin)
        self._ops.write_kv(key, rows.value, key_cache, value_cache, slot_mapping)
        return query
