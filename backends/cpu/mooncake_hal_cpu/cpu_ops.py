"""The ops of the CPU backend: C++ kernels where they are faster than torch, torch elsewhere.

Every row and every sequence is computed separately, in an order that depends only on its own
length. Its result does not depend on the rest of the batch or on the number of threads.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from mooncake_hal import hal_env
from mooncake_hal.backend import AttentionBatch
from mooncake_hal.errors import NativeUnavailable
from mooncake_hal.native import warn_fallback
from mooncake_hal_cpu.kernels import load_kernels
from mooncake_hal_cpu.op_replay import record_call
from mooncake_hal_cpu.torch_ops import TorchOps

logger = logging.getLogger(__name__)

_LANES = 16
_PANEL = 64
_DTYPES = (torch.bfloat16, torch.float32)
# largest number of heads that share a pass over the latents: with fewer heads, more threads have
# work; with more heads, the latents are read less often
_MLA_HEADS = 32
# below this number of elements, waking a second thread costs more than it saves
_PARALLEL_ELEMENTS = 1 << 16


def cpu_ops() -> TorchOps:
    """The fastest ops that this host supports; a slower choice is logged with its reason."""
    if not hal_env.cpu_native():
        warn_fallback("mooncake_hal_cpu", "plain torch", "MOONCAKE_HAL_CPU_NATIVE=0")
        return TorchOps()
    try:
        return NativeOps(load_kernels())
    except NativeUnavailable as exc:
        warn_fallback("mooncake_hal_cpu", "plain torch", exc.reason)
        return TorchOps()


class NativeOps(TorchOps):
    """Ops with C++ kernels, and with torch for shapes and dtypes that the kernels don't support.

    Args:
        library: the compiled kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._has_linear = not _has_amx()

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        tokens, heads, dim = key.shape
        same = key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
        if not same or key.stride(2) != 1 or value.stride(2) != 1:
            super().write_kv(key, value, key_cache, value_cache, slot_mapping)
            return
        layout = _write_layout(
            key.stride() + value.stride() + key_cache.stride() + value_cache.stride(),
            (tokens, heads, key_cache.shape[1], dim, value.shape[2]),
            key.element_size(),
        )
        record_call(
            self._library.write_kv,
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slot_mapping.data_ptr(),
            layout,
            _threads(key.numel()),
        )

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        if not _fits(query, key_cache, value_cache):
            return super().decode_attention(query, key_cache, value_cache, batch, scale)
        out = torch.empty(query.shape, dtype=query.dtype)
        record_call(
            self._library.decode_attention,
            out.data_ptr(),
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            _attention_strides(query, key_cache, value_cache, batch.block_tables),
            _attention_shape(len(query), query, key_cache),
            scale,
            query.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        if not _fits(query, key_cache, value_cache):
            return super().prefill_attention(query, key_cache, value_cache, batch, scale)
        out = torch.empty(query.shape, dtype=query.dtype)
        first = batch.num_decodes
        tables = batch.block_tables[first:]
        record_call(
            self._library.prefill_attention,
            out.data_ptr(),
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            tables.data_ptr(),
            batch.context_lens[first:].data_ptr(),
            batch.query_start[first:].data_ptr(),
            _attention_strides(query, key_cache, value_cache, tables),
            _attention_shape(len(tables), query, key_cache),
            scale,
            query.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out

    def mla_decode_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        if not _fits_latents(query, latent_cache, rope_cache):
            return super().mla_decode_attention(query, latent_cache, rope_cache, batch, scale)
        sequences, heads, _ = query.shape
        latent_dim = latent_cache.shape[3]
        out = torch.empty((sequences, heads, latent_dim), dtype=query.dtype)
        groups = _head_groups(heads)
        shape = (sequences, heads, groups, latent_dim, latent_cache.shape[1], rope_cache.shape[3])
        record_call(
            self._library.mla_decode_attention,
            out.data_ptr(),
            query.data_ptr(),
            latent_cache.data_ptr(),
            rope_cache.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lens.data_ptr(),
            _attention_strides(query, latent_cache, rope_cache, batch.block_tables),
            _int64s(shape),
            scale,
            query.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _DTYPES or weight.dtype != x.dtype or x.dim() > 3 or x.stride(-1) != 1:
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        (outer, inner, dim), strides = _three_dims(x)
        record_call(
            self._library.rms_norm,
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            outer,
            inner,
            *strides,
            dim,
            eps,
            x.dtype is torch.bfloat16,
            _threads(x.numel()),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Works in place: x's memory receives the norm, the residual's memory the sum."""
        same = x.dtype == residual.dtype == weight.dtype and x.dtype in _DTYPES
        if not same or not x.is_contiguous() or not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        dim = x.shape[-1]
        record_call(
            self._library.add_rms_norm,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            x.numel() // dim,
            dim,
            eps,
            x.dtype is torch.bfloat16,
            _threads(x.numel()),
        )
        return x, residual

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Works in place."""
        dense = query.stride(2) == key.stride(2) == 1 and cos_sin.is_contiguous()
        if query.dtype not in _DTYPES or key.dtype != query.dtype or not dense:
            return super().rope(query, key, positions, cos_sin)
        tokens, heads = query.shape[:2]
        shape = (tokens, heads, key.shape[1], cos_sin.shape[1])
        record_call(
            self._library.rope,
            query.data_ptr(),
            key.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            _int64s(shape + query.stride()[:2] + key.stride()[:2]),
            query.dtype is torch.bfloat16,
            _threads(query.numel()),
        )
        return query, key

    def pack_weight(self, weight: Tensor) -> Tensor:
        """Arrange a bfloat16 weight in panels, see ``linear.cpp``; with AMX, pack it for oneDNN."""
        return _panels(weight) if self._takes(weight) else super().pack_weight(weight)

    def unpack_weight(self, packed: Tensor) -> Tensor:
        if packed.is_mkldnn or not self._takes(packed):
            return super().unpack_weight(packed)
        return _from_panels(packed)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.is_mkldnn or not self._takes(weight):
            return super().linear(x, weight, bias)
        outputs, inputs = weight.shape
        rows = len(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((rows, outputs), dtype=x.dtype)
        record_call(
            self._library.linear,
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            _int64s((rows, x.stride(0), inputs, outputs)),
            _threads(rows * outputs * inputs),
        )
        return out

    def _takes(self, weight: Tensor) -> bool:
        """Whether our kernel multiplies by this weight, whether it is packed already or not."""
        is_bfloat16 = weight.dtype is torch.bfloat16
        return self._has_linear and is_bfloat16 and weight.shape[1] % 2 == 0

    def silu_mul(self, x: Tensor) -> Tensor:
        if x.dtype not in _DTYPES or x.dim() != 2 or x.stride(1) != 1:
            return super().silu_mul(x)
        rows, width = x.shape
        out = torch.empty((rows, width // 2), dtype=x.dtype)
        record_call(
            self._library.silu_mul,
            x.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            width // 2,
            x.dtype is torch.bfloat16,
            _threads(x.numel()),
        )
        return out


def _fits(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the attention kernels support these tensors."""
    dim, dtype = query.shape[2], query.dtype
    same = key_cache.dtype == value_cache.dtype == dtype and value_cache.shape[3] == dim
    return same and dtype in _DTYPES and dim % _LANES == 0 and query.stride(2) == 1


def _fits_latents(query: Tensor, latent_cache: Tensor, rope_cache: Tensor) -> bool:
    """Whether the latent attention kernel supports these tensors."""
    dtype, dims = query.dtype, (latent_cache.shape[3], rope_cache.shape[3])
    same = latent_cache.dtype == rope_cache.dtype == dtype and sum(dims) == query.shape[2]
    whole = all(dim % _LANES == 0 for dim in dims)
    return same and whole and dtype in _DTYPES and query.stride(2) == 1


def _head_groups(heads: int) -> int:
    """The number of equally large head groups that each share a pass over the latents; it depends
    on the number of heads only."""
    size = next(size for size in range(min(heads, _MLA_HEADS), 0, -1) if heads % size == 0)
    return heads // size


def _has_amx() -> bool:
    """Whether the processor multiplies bfloat16 tiles (AMX), for which oneDNN has kernels."""
    return bool(torch.cpu._is_amx_tile_supported())


def _panels(weight: Tensor) -> Tensor:
    """Arrange a weight [out, in] in the panels of ``linear.cpp``; the tensor keeps its shape."""
    outputs, inputs = weight.shape
    count = -(-outputs // _PANEL)
    padded = functional.pad(weight, (0, 0, 0, count * _PANEL - outputs))
    panels = padded.view(count, _PANEL, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()
    return panels.as_strided(weight.shape, (inputs, 1))


def _from_panels(packed: Tensor) -> Tensor:
    """The inverse of ``_panels``: [out, in]."""
    outputs, inputs = packed.shape
    count = -(-outputs // _PANEL)
    strides = (inputs * _PANEL, 2 * _PANEL, 2, 1)
    panels = packed.as_strided((count, inputs // 2, _PANEL, 2), strides)
    return panels.permute(0, 2, 1, 3).reshape(count * _PANEL, inputs)[:outputs]


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _PARALLEL_ELEMENTS else 1


def _three_dims(x: Tensor) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Shape and outer strides of x, which has one to three dimensions, as if it had three."""
    shape, strides = x.shape, x.stride()
    padding = 3 - len(shape)
    outer, inner, dim = (1,) * padding + tuple(shape)
    outer_stride, inner_stride, _ = (0,) * padding + tuple(strides)
    return (outer, inner, dim), (outer_stride, inner_stride)


@lru_cache(maxsize=4096)
def _int64s(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """A C array of the values, cached because the same shapes recur in every step."""
    return (ctypes.c_int64 * len(values))(*values)


def _attention_strides(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor
) -> ctypes.Array[ctypes.c_int64]:
    size = query.element_size()
    caches = [stride * size for stride in key_cache.stride()[:3] + value_cache.stride()[:3]]
    return _int64s((*caches, *query.stride()[:2], tables.stride(0)))


def _attention_shape(
    sequences: int, query: Tensor, key_cache: Tensor
) -> ctypes.Array[ctypes.c_int64]:
    _, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    return _int64s((sequences, heads, kv_heads, head_dim, block_size))


@lru_cache(maxsize=4096)
def _write_layout(
    strides: tuple[int, ...], shape: tuple[int, int, int, int, int], element_bytes: int
) -> ctypes.Array[ctypes.c_int64]:
    """The layout argument of ``write_kv``.

    ``strides`` are those of key and value (3 each) and of the two caches (4 each), in elements.
    """
    tokens, heads, block_size, *dims = shape
    wanted = (*strides[0:2], *strides[3:5], *strides[6:9], *strides[10:13])
    in_bytes = [stride * element_bytes for stride in wanted]
    widths = [dim * element_bytes for dim in dims]
    return _int64s((*in_bytes, tokens, heads, block_size, *widths))
