"""Transfer of a prompt's KV between processes on one GPU over ``cuda_ipc``, compared with a copy
inside the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.figures import Figure, record
from support.kv_transfer_case import KVTransferCase, reading

from mooncake_hal.backend import Backend
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_hal.transport import EndpointOptions

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]
LLAMA_8B = KVGeometry(AttentionKind.GQA, 32, 8, (128, 128), "bfloat16", 2)
NBYTES = 4 << 30
"""Tokens that a decode rank reads: 32k, or 64k if it is one of two."""
ROUNDS = 10
OPTIONS = EndpointOptions(secret=b"bench", device="cuda:0")
WHOLE, IN_LAYERS = "BHLPT", "LPBHT"
CASES = [(WHOLE, 1, 1), (WHOLE, 2, 1), (WHOLE, 4, 1), (WHOLE, 1, 2), (WHOLE, 4, 2)]
CASES += [(IN_LAYERS, 1, 1), (IN_LAYERS, 2, 1)]
BOUNDS = {WHOLE: 0.7, IN_LAYERS: 0.5}
"""Shares of a copy's bandwidth. The host prepares a part of 256 MiB in some 150 us, while the
previous part is copied in 125. The layout of layerwise pushes, which compute hides, has pieces of
32 KiB or less: the host prepares one in about the time in which the device copies it."""


@pytest.mark.parametrize(("layout", "prefill", "decode"), CASES)
def test_kv_transfer(cuda: Backend, benchmark: Any, layout: str, prefill: int, decode: int) -> None:
    """The planner's spans: blocks in random order, and different numbers of ranks on the two
    sides."""
    tokens = decode * NBYTES // LLAMA_8B.token_bytes
    case = KVTransferCase(LLAMA_8B, layout, prefill, decode, tokens)
    with reading(case, "cuda_ipc", "support.cuda_device:allocate", OPTIONS) as reader:
        taken = best_of(reader.read)
        pieces = sum(len(plan.spans) for plan in reader.plans)
    plain = best_of(plain_copy())
    title = f"cuda_ipc, {layout}, {prefill} to {decode} ranks"
    context = f"{NBYTES / taken / 1e9:.0f} GB/s, {pieces} pieces"
    record(benchmark, Figure(title, plain / taken, BOUNDS[layout], "of copy", context=context))
    benchmark(lambda: None)  # the recorded metric decides


def plain_copy() -> Callable[[], None]:
    """A copy of the same number of bytes in one piece."""
    source = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return copy


def best_of(run: Callable[[], None]) -> float:
    """Seconds of the fastest round, after one warm-up round."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
