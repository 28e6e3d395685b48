"""Writes into the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels.registry import kernel, require
from torch_npu.kernels.rows import rms_norm


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
    require(slots.unique().numel() == slots.numel(), "a slot is written twice")
    for new, cache in ((key, key_cache), (value, value_cache)):
        require(cache.shape[2:] == new.shape[1:], f"{tuple(new.shape)} into {tuple(cache.shape)}")
        cache.view(-1, *cache.shape[2:])[slots] = new


@kernel("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **quantisation: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(cache_mode == "PA", "the emulation writes plain paged caches: cache_mode='PA'")
    require(kv.dim() == 4 and kv.shape[1] == 1 and kv.shape[3] == 576, "kv is [tokens, 1, 1, 576]")
    require(index.dtype == torch.int64, "index is int64")
    require(not any(each is not None for each in quantisation.values()), "no quantisation here")
    latent, rope = kv.flatten(0, 2).split((512, 64), -1)
    normed = rms_norm(latent, gamma, epsilon)[0]
    pairs = rope.float().unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)  # interleaved in
    first, second = pairs.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    rotated = pairs * cos.float().flatten(0, 2) + turned * sin.float().flatten(0, 2)
    for new, cache in ((rotated, k_cache), (normed, ckv_cache)):
        cache.view(-1, cache.shape[-1])[index] = new.to(cache.dtype)
    return k_cache, ckv_cache, rotated.to(kv.dtype), normed
