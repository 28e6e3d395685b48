"""The latent attention ops of a backend's contract, and a composed implementation of its KV writes.

Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) has the planes latent and rope in place of key
and value: per token one latent row and one rotated row, which all query heads share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mooncake_hal.backend import AttentionBatch, Ops


PAIRS = "pairs"
"""Order of rotated elements in which neighbours form a pair (0 and 1, 2 and 3, ...), as in
DeepSeek's checkpoints."""
HALVES = "halves"
"""Order of rotated elements in which i and i + n / 2 form a pair (NeoX style)."""


class LatentRows(NamedTuple):
    """Output of a layer's compressing projection for new tokens, and the parameters for turning it
    into KV rows.

    Args:
        compressed: [tokens, latent_dim + rope_dim]; the elements to be rotated come last, in the
            order that ``LatentOps.pack_rope`` establishes.
        norm_weight: [latent_dim], weight of the latents' RMS norm.
        eps: epsilon of that norm.
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
        """Reorder rows of a projection's weight or bias, from the order of halves to the order in
        which ``write_latents`` expects the projection's outputs. Called once after loading."""
        ...

    def write_latents(
        self,
        query: Tensor,  # [tokens, heads, rope_dim], the part of the queries to be rotated
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,  # [tokens] int64
    ) -> Tensor:  # like query
        """Normalise the latents, rotate the rope rows and queries, and write both rows of each
        token to its slot.

        Returns the rotated queries. They and the rope rows in the cache are in the order of halves
        (NeoX style). The norm and the rotation are those of ``Ops``, except that the table may be
        rounded to the rows' dtype before the rotation. May work in place.
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

        A token's key is its latent followed by its rope row, its value is the latent; all heads
        share both.
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
        """The same for the remaining sequences, with a causal mask."""
        ...


class NativeLatentOps(Protocol):
    """Latents in the device's native layout; implemented where ``capabilities.native_latents`` is
    True.

    A device's attention may read the latents of a block faster in a layout other than rows: the
    native layout. It is opaque and uses exactly the bytes of the block's own planes, so that ops
    which move whole blocks preserve it.
    """

    def with_native_latents(self) -> LatentOps:
        """Return the same ops for caches all of whose blocks are in the native layout."""
        ...

    def convert_latents(
        self,
        cache: Tensor,  # one plane of a layer
        block_ids: Tensor,  # [n] int64, distinct
    ) -> None:
        """Convert blocks from rows to the native layout, in place; they may be partly filled."""
        ...


class ComposedLatentWrites:
    """Base class for ops without a fused kernel. Queries and rows are rotated in one call of
    ``rope``; the KV's scales are applied by ``write_kv``."""

    def pack_rope(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged: ``rope`` takes halves."""
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
