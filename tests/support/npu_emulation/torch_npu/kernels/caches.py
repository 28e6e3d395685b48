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
    """Slots that two tokens write; their content is unspecified."""
    found, counts = slots.unique(return_counts=True)
    return found[counts > 1]


LATENT, ROPE = 512, 64


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
    **others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotates the element pairs (0, 1), (2, 3), ... and stores them as halves."""
    given = sorted(name for name, value in others.items() if value is not None)
    require(not given, f"the emulation neither quantises nor takes values apart: {given}")
    require(cache_mode in ("PA", "PA_BNSD", "PA_NZ"), f"the emulation knows no {cache_mode!r}")
    is_nz = cache_mode == "PA_NZ"
    _require_latents((kv, gamma, cos, sin, k_cache, ckv_cache))
    require(index.dtype == torch.int64 and index.shape == kv.shape[:1], "index is int64, [B * S]")
    require(k_cache.shape[1] % 16 == 0, f"block_size {k_cache.shape[1]}: by 32 bytes")
    size = k_cache.shape[0] * k_cache.shape[1]
    require(bool(((index >= -1) & (index < size)).all()), f"slots lie in [0, {size}), or are -1")
    wide = kv[:, 0].float()
    latent, (first, second) = wide[..., :LATENT], (wide[..., LATENT + at :: 2] for at in (0, 1))
    inverse = torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + epsilon)
    halves, turned = torch.cat((first, second), -1), torch.cat((-second, first), -1)
    rows = (
        (halves * cos[:, 0].float() + turned * sin[:, 0].float()).to(kv.dtype),
        (latent * inverse * gamma.float()).to(kv.dtype),
    )
    for new, cache in zip(rows, (k_cache, ckv_cache), strict=True):
        _store(new[index >= 0], cache, index[index >= 0], is_nz)
    outputs = [new if is_output_kv else torch.full_like(new, float("nan")) for new in rows]
    return k_cache, ckv_cache, outputs[0].unsqueeze(1), outputs[1].unsqueeze(1)


def _require_latents(tensors: tuple[Tensor, ...]) -> None:
    kv, gamma, cos, _, k_cache, ckv_cache = tensors
    dtypes = {each.dtype for each in tensors}
    one = dtypes in ({torch.bfloat16}, {torch.float16})
    require(one, f"all of one type, bfloat16 or float16, not {sorted(map(str, dtypes))}")
    require(all(each.numel() for each in tensors), "empty tensors are not supported")
    require(kv.dim() == 4, "4D tensor expected for input kv")
    require(gamma.dim() == 1, "1D tensor expected for input gamma")
    require(cos.dim() == 4, "4D tensor expected for input cos")
    tokens = kv.shape[0]
    wanted = [(tokens, 1, 1, LATENT + ROPE), (LATENT,), *2 * [(tokens, 1, 1, ROPE)]]
    found = [tuple(each.shape) for each in tensors[:4]]
    require(found == wanted, f"kv, gamma, cos and sin are {wanted}, not {found}")
    blocks = tuple(k_cache.shape[:2])
    caches = [tuple(each.shape) for each in (k_cache, ckv_cache)]
    wanted = [(*blocks, 1, ROPE), (*blocks, 1, LATENT)]
    require(caches == wanted, f"the caches are {wanted}, not {caches}")
    require(k_cache.is_contiguous() and ckv_cache.is_contiguous(), "caches must be contiguous")


def _store(new: Tensor, cache: Tensor, slots: Tensor, is_nz: bool) -> None:
    """Write rows [tokens, 1, dim] into their slots; poison slots that two tokens share."""
    blocks, block_size, heads, dim = cache.shape
    rows = cache.view(blocks, block_size, dim)
    if is_nz:
        tiles = cache.view(blocks, heads, dim // 16, block_size, 16)
        rows = tiles.permute(0, 3, 1, 2, 4)  # [blocks, tokens, 1, dim / 16, 16]
    where = (slots // block_size, slots % block_size)
    rows[where] = new.view(len(new), *rows.shape[2:])
    twice = _written_twice(slots)
    rows[twice // block_size, twice % block_size] = float("nan")
