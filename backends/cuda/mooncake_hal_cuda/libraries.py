"""Attention by libraries, behind the same call as our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mooncake_hal_cuda.attention import Attention, attend_grouped
from mooncake_hal_cuda.choosing import AUTO, OURS, Chooser, Trial
from mooncake_hal_cuda.tuning import Tuning

_WORKSPACE_BYTES = 128 << 20
_TRIAL_TOKENS = 2048
_TRIAL_BLOCKS = 16
_TRIAL_SEQUENCES = 16
_TOLERANCE = 2e-2
_WARM_UPS, _RUNS = 2, 5

Attend = Callable[[Attention], Tensor]


def by_sdpa(call: Attention) -> Tensor:
    """Torch's attention (cuDNN's or FlashAttention's, as torch decides) over gathered KV."""
    from torch.nn.attention.bias import causal_lower_right

    batch, out, start = call.batch, torch.empty_like(call.query), 0
    for sequence in range(call.first, call.first + call.sequences):
        stop = start + batch.host_query_lens[sequence]
        context = batch.host_context_lens[sequence]
        blocks = batch.block_tables[sequence, : -(-context // batch.block_size)]
        key, value = (
            cache.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1).unsqueeze(0)
            for cache in call.caches
        )
        query = call.query[start:stop].transpose(0, 1).unsqueeze(0)
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=causal_lower_right(stop - start, context),
            scale=call.scale,
            enable_gqa=True,
        )
        out[start:stop] = attended[0].transpose(0, 1)
        start = stop
    return out


def by_varlen(call: Attention) -> Tensor:
    """Torch's paged FlashAttention; one split, so that a result does not depend on its batch."""
    from torch.nn.attention.varlen import varlen_attn

    batch, first = call.batch, call.first
    starts = batch.query_start[first:]
    attended = varlen_attn(
        call.query,
        *call.caches,
        starts - starts[0],
        None,
        call.new_tokens,
        call.capacity,
        scale=call.scale,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=batch.context_lens[first:],
        block_table=batch.block_tables[first:],
        num_splits=1,
    )
    return cast(Tensor, attended)  # a pair only if asked for


def by_flashinfer(call: Attention) -> Tensor:
    """FlashInfer's decode over paged KV, without a plan on the host."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    key, value = call.caches
    attended: Tensor = trtllm_batch_decode_with_kv_cache(
        call.query,
        (key, value),
        _workspace(call.query.device),
        call.batch.block_tables[: call.sequences],
        call.batch.context_lens[: call.sequences],
        call.capacity,
        bmm1_scale=call.scale,
        bmm2_scale=1.0,
        kv_layout="NHD",
    )
    return attended


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


PREFILL = {"sdpa": by_sdpa, "varlen": by_varlen}
DECODE = {"flashinfer": by_flashinfer}
"""Only for those who ask for it: a sequence's result depends on the others of its batch."""


class GroupedAttention:
    """Attention with grouped heads, on whatever was chosen for its shape.

    Args:
        tuning: of the device.
        chooser: remembers.
    """

    def __init__(self, tuning: Tuning, chooser: Chooser) -> None:
        self._tuning = tuning
        self._chooser = chooser
        wanted = chooser.wanted
        self._prefill = {n: by for n, by in PREFILL.items() if wanted in (AUTO, n)}
        self._decode = {n: by for n, by in DECODE.items() if wanted == n}

    def __call__(self, call: Attention) -> Tensor:
        """[tokens, heads, value dim]."""
        libraries = self._decode if call.is_decode else self._prefill
        name = OURS
        if libraries and _is_plain(call):
            tries = None
            if not torch.cuda.is_current_stream_capturing():
                tries = partial(self._tries, call, libraries)
            op = "decode" if call.is_decode else "prefill"
            name = self._chooser.pick(op, _shape_of(call), tries)
        return attend_grouped(call, self._tuning) if name == OURS else libraries[name](call)

    def _tries(self, call: Attention, libraries: Mapping[str, Attend]) -> Sequence[Trial]:
        trial = trial_call(call)
        expected = attend_grouped(trial, self._tuning)
        ours = Trial(OURS, _milliseconds(lambda: attend_grouped(trial, self._tuning)))
        return [ours] + [_try(name, by, trial, expected) for name, by in libraries.items()]


def _is_plain(call: Attention) -> bool:
    """Whether libraries have such attention: on a GPU, in 16 bits, KV of the queries' type."""
    query, (key, value) = call.query, call.caches
    is_plain = key.dtype == query.dtype != torch.float32 and key.shape == value.shape
    return query.device.type == "cuda" and is_plain and len(query) > 0


def _shape_of(call: Attention) -> tuple[object, ...]:
    key = call.caches[0]
    return (str(key.dtype), call.query.shape[1], *key.shape[1:], key.stride())


def trial_call(call: Attention) -> Attention:
    """A call of the same shapes and strides, of as many tokens as a busy step has.

    Its caches are a few blocks of random numbers, taken over and again.
    """
    device, dtype = call.query.device, call.query.dtype
    num_blocks, block_size = min(_TRIAL_BLOCKS, len(call.caches[0])), call.batch.block_size
    new, sequences = (1, _TRIAL_SEQUENCES) if call.is_decode else (_TRIAL_TOKENS, 1)
    width = -(-_TRIAL_TOKENS // block_size)
    key, value = (
        torch.empty_strided(
            (num_blocks, *cache.shape[1:]), cache.stride(), dtype=dtype, device=device
        )
        for cache in call.caches
    )
    counted = partial(torch.arange, dtype=torch.int32, device=device)
    batch = replace(
        call.batch,
        num_decodes=sequences if call.is_decode else 0,
        query_start=counted(sequences + 1) * new,
        context_lens=counted(sequences) * 0 + _TRIAL_TOKENS,
        block_tables=(counted(width) % num_blocks).repeat(sequences, 1),
        host_query_lens=(new,) * sequences,
        host_context_lens=(_TRIAL_TOKENS,) * sequences,
    )
    query = torch.randn(sequences * new, *call.query.shape[1:], dtype=dtype, device=device)
    caches = (key.normal_(), value.normal_())
    trial = replace(call, query=query, caches=caches, batch=batch)
    return replace(trial, first=0, new_tokens=new, sequences=sequences)


def _try(name: str, by: Attend, call: Attention, expected: Tensor) -> Trial:
    """Run a library on a call whose result is known; what it raises is its refusal."""
    try:
        found = by(call)
        torch.cuda.synchronize()
    except (ImportError, RuntimeError, ValueError, TypeError, AssertionError) as exc:
        return Trial(name, None, f"it can't be used here: {exc}")
    off = float((found.float() - expected.float()).abs().max())
    if not off <= _TOLERANCE:
        return Trial(name, None, f"its result is off by {off:.3g}")
    return Trial(name, _milliseconds(lambda: by(call)))


def _milliseconds(run: Callable[[], Tensor]) -> float:
    for _ in range(_WARM_UPS):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
    begin.record()
    for _ in range(_RUNS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _RUNS
