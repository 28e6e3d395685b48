"""A CPU attention backend for vLLM with linear KV, token after token, as on GPUs.

vLLM's own CPU backend packs K for the instructions that it finds, so that no other engine can read
it. This one replaces it through vLLM's registry of attention backends and its plugins; scheduling,
allocation and transfers remain vLLM's. Slow: one request at a time, in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

PLUGIN = "vllm-linear-attention"


def install(folder: Path) -> None:
    """Write a plugin that vLLM finds if ``folder`` and tests/ are on PYTHONPATH."""
    described = folder / f"{PLUGIN.replace('-', '_')}-1.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nlinear_attention = {__name__}:register\n"
    )


def register() -> None:
    """Called by vLLM in each of its processes."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.LinearBackend")


class LinearBackend(AttentionBackend):  # type: ignore[misc]  # vLLM is not installed where types are
    """Replaces ``CPU_ATTN``; the KV has vLLM's shape: ``[blocks, heads, tokens, K|V]``."""

    forward_includes_kv_cache_update = False
    supported_dtypes = (torch.float32,)

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[LinearImpl]:
        return LinearImpl

    @staticmethod
    def get_builder_cls() -> type[LinearBuilder]:
        return LinearBuilder


@dataclass
class Batch:
    """The rows and blocks of each request."""

    query_starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # [requests, blocks]
    slot_mapping: torch.Tensor  # [tokens]
    num_actual_tokens: int


class LinearBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # as above
    """Builds the metadata of a step."""

    def __init__(self, spec: Any, layer_names: list[str], config: Any, device: Any) -> None:
        super().__init__(spec, layer_names, config, device)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Batch:
        return Batch(
            common.query_start_loc[: common.num_reqs + 1].tolist(),
            common.seq_lens[: common.num_reqs].tolist(),
            common.block_table_tensor,
            common.slot_mapping,
            common.num_actual_tokens,
        )


class LinearImpl(AttentionImpl):  # type: ignore[misc]  # as above
    """Causal attention over paged, linear KV."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *_: Any, **__: Any
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        blocks, tokens = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        count = len(slot_mapping)
        kv_cache[blocks, :, tokens] = torch.cat([key[:count], value[:count]], dim=-1)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [tokens, heads, head_size]
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,  # [blocks, kv heads, tokens, 2 * head_size]
        attn_metadata: Batch | None,
        output: torch.Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # warm-up
            return output
        starts = attn_metadata.query_starts
        for number, length in enumerate(attn_metadata.seq_lens):
            rows = slice(starts[number], starts[number + 1])
            pages = kv_cache[
                attn_metadata.block_table[number, : -(-length // kv_cache.shape[2])].long()
            ]
            dense = pages.transpose(0, 1).flatten(1, 2)[:, :length]
            keys, values = dense.repeat_interleave(
                self.num_heads // self.num_kv_heads, dim=0
            ).split(self.head_size, dim=-1)
            asked = query[rows].transpose(0, 1)  # [heads, queries, head_size]
            count = asked.shape[1]
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            found = torch.nn.functional.scaled_dot_product_attention(
                asked, keys, values, attn_mask=mask, scale=self.scale
            )
            output[rows] = found.transpose(0, 1).reshape(output[rows].shape)
        return output
