"""Our calls of FlashInfer match the signatures in its wheel, which is not installed without a GPU.

``flashinfer.json`` has the signatures and the wheel's version; ``make test-cuda`` checks results.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")

from support.cuda_flashinfer import planned
from support.cuda_shapes import Shapes

from mooncake_hal_cuda.attention_launch import AttentionCall
from mooncake_hal_cuda.attention_libraries import by_flashinfer
from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.launch_tuning import Tuning

SIGNATURES = json.loads(Path(__file__).with_name("flashinfer.json").read_text())
WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"
SEMAPHORE_BYTES = 8 << 20
"""Size of the part of the workspace that must be zeroed before the first call
(flashinfer/decode.py)."""

Calls = dict[str, dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces FlashInfer's functions by their signatures; records the arguments of each call."""
    recorded: Calls = {}

    def binding(name: str) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(eval(f"lambda {SIGNATURES[name]}: None"))

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = signature.bind(*args, **kwargs)
            recorded[name] = dict(bound.arguments)
            return torch.zeros(1)

        return call

    def wrapper(*args: Any, **kwargs: Any) -> SimpleNamespace:
        binding(f"{WRAPPER}.__init__")(None, *args, **kwargs)
        methods = {name: binding(f"{WRAPPER}.{name}") for name in ("plan", "run")}
        bound = {name: lambda *a, of=of, **k: of(None, *a, **k) for name, of in methods.items()}
        return SimpleNamespace(**bound)

    decode = ModuleType("flashinfer.decode")
    function = "trtllm_batch_decode_with_kv_cache"
    vars(decode).update({function: binding(function), WRAPPER: wrapper})
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    return recorded


@pytest.fixture
def call() -> AttentionCall:
    """Decode three sequences of 64 tokens in blocks of 16."""
    shapes = Shapes(CudaOps(Tuning("sm_90", 132)), torch.bfloat16, "cpu", make=torch.zeros)
    query, cache = shapes.new(3, 8, 64), shapes.new(12, 16, 2, 64)
    batch = shapes.batch(1, 4, sequences=3)
    return AttentionCall.of_decodes(query, (cache, cache), batch, 0.125, (1.0, 1.0))


def test_decode_call_matches_signature(calls: Calls, call: AttentionCall) -> None:
    by_flashinfer(call)
    given = calls["trtllm_batch_decode_with_kv_cache"]
    assert given["kv_layout"] == "NHD"
    assert (given["bmm1_scale"], given["bmm2_scale"]) == (0.125, 1.0)
    assert given["max_seq_len"] == 64
    assert given["block_tables"].shape == (3, 4)
    assert given["seq_lens"].tolist() == [64] * 3
    assert not given["workspace_buffer"][:SEMAPHORE_BYTES].any()
    assert given["workspace_buffer"].numel() > SEMAPHORE_BYTES


def test_planned_call_matches_signature(calls: Calls, call: AttentionCall) -> None:
    """The variant that the benchmark compares with."""
    way = planned((call.query, *call.caches), call.batch, call.scale, with_tensor_cores=True)
    way()
    given = calls[f"{WRAPPER}.plan"]
    assert given["indptr"].tolist() == [0, 4, 8, 12]
    assert given["last_page_len"].tolist() == [16] * 3
    heads = [given[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]
    assert heads == [8, 2, 64, 16]
    assert calls[f"{WRAPPER}.run"]["q"] is call.query
