"""Latent attention's part of a backend's contract, and its writes composed of other ops.

Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) has the planes latent and rope in place of key
and value: per token a latent row and a rotated row, of one head that all heads of a query share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mooncake_hal.backend import AttentionBatch, Ops


PAIRS = "pairs"
"""An order of rotated elements: 0 and 1 are turned together, 2 and 3, and so on, as in DeepSeek's
checkpoints."""
HALVES = "halves"
"""The other one, NeoX form: elements i and i + n / 2 are turned together."""


class LatentRows(NamedTuple):
    """New tokens as a layer's narrow projection leaves them, and what their rows are made with.

    Args:
        compressed: [tokens, latent_dim + rope_dim]; what is rotated comes last, in the order of
            ``LatentOps.pack_rope``.
        norm_weight: [latent_dim], of the latents' RMS norm.
        eps: of that norm.
        positions: [tokens] int64.
        cos_sin: [max_positions, rope_dim] float32, cosines then sines.
    """

    compressed: Tensor
    norm_weight: Tensor
    eps: float
    positions: Tensor
    cos_sin: Tensor


class LatentOps(Protocol):
    """The kernels of latent attention."""

    def pack_rope(
        self,
        rows: Tensor,  # [rope_dim, ...]
    ) -> Tensor:  # like rows
        """Return rows of a projection's weight or bias, whose outputs are to be rotated as halves,
        in the order that ``write_latents`` takes those outputs in; called once after loading."""
        ...

    def write_latents(
        self,
        query: Tensor,  # [tokens, heads, rope_dim], what is rotated of the queries
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,  # [tokens] int64
    ) -> Tensor:  # like query
        """Norm the latents, rotate what is rotated, store both rows of each token in its slot.

        Returns the rotated queries. They, and the rows in the cache, are halves (NeoX form). The
        norm and the rotation are those of ``Ops``, but the rows may be rotated by a table that is
        rounded to their type first. May work in place.
        """
        ...

    def mla_decode_attention(
        self,
        query: Tensor,  # [num_decodes, heads, latent_dim + rope_dim]
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:  # [num_decodes, heads, latent_dim]
        """Attention of the batch's leading decodes over paged latents, in the absorbed form.

        A token's key is its latent and its rope row together, its value the latent again; all
        heads share them.
        """
        ...

    def mla_prefill_attention(
        self,
        query: Tensor,  # [tokens of the sequences after the decodes, heads, latent_dim + rope_dim]
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:  # [tokens, heads, latent_dim]
        """The same, causal, for the remaining sequences."""
        ...


class NativeLatentOps(Protocol):
    """What the ``ops`` of a backend with ``capabilities.native_latents`` also do.

    Attention may read latents best in blocks of another form than rows: the native form. It is
    opaque, and lies within the bytes of the block's own planes; ops that move whole blocks keep it.
    """

    def with_native_latents(self) -> LatentOps:
        """The same ops over caches all of whose blocks are in the native form."""
        ...

    def convert_latents(
        self,
        cache: Tensor,  # one plane of a layer
        block_ids: Tensor,  # [n] int64, all different
    ) -> None:
        """Turn blocks of rows, filled in whole or in part, into the native form, in place."""
        ...


class ComposedLatentWrites:
    """A base for ops without a fused kernel: queries and rows are rotated in one call of ``rope``,
    and ``write_kv`` brings scales of the KV along."""

    def pack_rope(self, rows: Tensor) -> Tensor:
        """Halves, as ``rope`` takes them."""
        return rows

    def write_latents(
        self: Ops,
        query: Tensor,
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        latent_dim, compressed = latent_cache.shape[-1], rows.compressed.unsqueeze(1)
        latent, key = compressed[..., :latent_dim], compressed[..., latent_dim:]
        query, key = self.rope(query, key, rows.positions, rows.cos_sin)
        latent = self.rms_norm(latent, rows.norm_weight, rows.eps)
        self.write_kv(latent, key, latent_cache, rope_cache, slot_mapping)
        return query
