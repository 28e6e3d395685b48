"""The contract of fused KV writes: norms of queries and keys, rotation and the KV write as one op.

Up to four ops run between a layer's projection and its attention. Each reads and writes the same
few rows, and each is a kernel launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mooncake_hal.backend import Ops


class QKNorms(NamedTuple):
    """RMS norms of a layer's queries and keys, applied per head.

    Args:
        query, key: [head_dim], the weights.
        eps: epsilon of both norms.
    """

    query: Tensor
    key: Tensor
    eps: float


class KVRows(NamedTuple):
    """Keys and values of new tokens as a layer's projection returns them, and the parameters of
    their norms and rotation.

    Args:
        key: [tokens, kv_heads, head_dim]; key, value and query may be views of one tensor.
        value: [tokens, kv_heads, value_dim]; value_dim may differ from head_dim.
        positions: [tokens] int64.
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines.
        norms: applied before the rotation; None: no norms.
    """

    key: Tensor
    value: Tensor
    positions: Tensor
    cos_sin: Tensor
    norms: QKNorms | None = None


class RopeWriteOps(Protocol):
    """The fused op; implemented where ``capabilities.fused_rope_writes`` is True."""

    def rope_and_write_kv(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        rows: KVRows,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,  # [tokens] int64
    ) -> Tensor:  # like query
        """Normalise queries and keys if ``rows.norms`` is set, rotate them, and write each token's
        key and value to its slot; returns the queries.

        Gives the same result as ``rms_norm``, ``rope`` and ``write_kv`` of ``Ops`` one after the
        other, including the rounding of normalised rows to their dtype before the rotation. May
        work in place.
        """
        ...


class ComposedRopeWrites:
    """``RopeWriteOps`` composed of a backend's separate ops, for backends that do not fuse them.

    Args:
        ops: the layer's ops, with the scales of its KV.
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
