"""Writes into the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels.registry import kernel, require


@kernel("npu_scatter_pa_kv_cache", takes_nz=True)
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    require(cache_mode in (None, "Norm"), "the emulation writes plain caches: cache_mode='Norm'")
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    require(all(each.is_contiguous() for each in tensors), "inputs must be contiguous")
    require(len({each.dtype for each in tensors[:4]}) == 1, "dtypes of keys and values differ")
    require(slot_mapping.dtype in (torch.int32, torch.int64), "slot_mapping is int32 or int64")
    require(key.dim() == 3 and key.shape[:2] == value.shape[:2], "keys and values differ in shape")
    slots = slot_mapping.long()
    size = key_cache.shape[0] * key_cache.shape[1]
    require(bool(((slots >= 0) & (slots < size)).all()), f"slots lie in [0, {size})")
    for new, cache in ((key, key_cache), (value, value_cache)):
        require(cache.shape[2:] == new.shape[1:], f"{tuple(new.shape)} into {tuple(cache.shape)}")
        cache.view(-1, *cache.shape[2:])[slots] = new
        cache.view(-1, *cache.shape[2:])[_written_twice(slots)] = float("nan")


def _written_twice(slots: Tensor) -> Tensor:
    """What lies in such a slot is not promised."""
    found, counts = slots.unique(return_counts=True)
    return found[counts > 1]
