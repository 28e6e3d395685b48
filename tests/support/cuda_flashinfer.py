"""FlashInfer's decode attention in each of its variants, to compare ours with the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.cuda_timing import seconds_of
from torch import Tensor

from mooncake_hal.backend import AttentionBatch, Backend
from mooncake_hal_cuda.attention_launch import AttentionCall
from mooncake_hal_cuda.attention_libraries import by_flashinfer

WORKSPACE_BYTES = 512 << 20
TOLERANCE = 2e-2
Way = Callable[[], Tensor]


def best_of_flashinfer(
    cuda: Backend,
    operands: tuple[Tensor, Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
    wanted: Tensor,
) -> tuple[str, float]:
    """The fastest variant and its seconds; a variant that is unavailable or gives wrong results is
    excluded.

    Args:
        cuda: captures and times.
        operands: query [sequences, heads, dim], key and value [blocks, tokens, heads, dim].
        batch: decodes of one length.
        scale: of the scores.
        wanted: the right result.
    """
    times: dict[str, float] = {}
    for name, prepare in ways(operands, batch, scale):
        try:
            way = prepare()
            off = float((way().float() - wanted.float()).abs().max())
            if off > TOLERANCE:
                raise ValueError(f"off by {off:.3g}")
            times[name] = seconds_of(cuda, way)
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as exc:
            print(f"FlashInfer's {name} is out: {exc}")  # printed into the benchmark's report
    if not times:
        pytest.skip("not run: FlashInfer is not here, or can't be used")
    fastest = min(times, key=lambda name: times[name])
    return fastest, times[fastest]


def ways(
    operands: tuple[Tensor, Tensor, Tensor], batch: AttentionBatch, scale: float
) -> Iterator[tuple[str, Callable[[], Way]]]:
    """Each variant's name and the function that plans it; planning is not timed."""
    query, key, value = operands
    yield (
        "trtllm_batch_decode",
        lambda: (
            lambda: by_flashinfer(
                AttentionCall.of_decodes(query, (key, value), batch, scale, (1.0, 1.0))
            )
        ),
    )
    for with_tensor_cores in (False, True):
        name = f"BatchDecode{', tensor cores' if with_tensor_cores else ''}"
        yield name, lambda tc=with_tensor_cores: planned(operands, batch, scale, tc)


def planned(
    operands: tuple[Tensor, Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
    with_tensor_cores: bool,
) -> Way:
    """FlashInfer's wrapper, planned for this batch."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    query, key, value = operands
    sequences, width = batch.block_tables.shape
    counted = torch.arange(sequences + 1, dtype=torch.int32, device=query.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    indices, last = batch.block_tables.flatten(), torch.full_like(counted[1:], batch.block_size)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=with_tensor_cores,
        paged_kv_indptr_buffer=counted * width,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last,
    )
    wrapper.plan(
        counted * width,
        indices,
        last,
        query.shape[1],
        key.shape[2],
        query.shape[2],
        batch.block_size,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
        sm_scale=scale,
    )
    return lambda: wrapper.run(query, (key, value))
