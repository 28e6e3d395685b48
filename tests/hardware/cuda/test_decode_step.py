"""A decode step's ops don't wait for the device and, in a graph, don't allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from support.cuda_waits import watched
from torch import Tensor

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_data import Case, Shape, make_case
from mooncake_hal.testing.backends_ops import assert_same, oracle

pytestmark = pytest.mark.cuda
SHAPE = Shape("bfloat16", "BHLPT", heads=32, kv_heads=8, head_dim=128)


@pytest.fixture
def case(cuda: Backend) -> Iterator[Case]:
    made = make_case(cuda, SHAPE, ((1, 700), (1, 33), (1, 4000)))
    yield made
    made.kv.free()


def step_of(cuda: Backend, case: Case, out: Tensor) -> Callable[[], None]:
    def step() -> None:
        kv, ops = case.kv, cuda.ops
        ops.write_kv(case.key, case.value, kv.key, kv.value, case.batch.slot_mapping)
        out.copy_(ops.decode_attention(case.query, kv.key, kv.value, case.batch, 0.1))

    return step


def test_a_step_does_not_wait(cuda: Backend, case: Case) -> None:
    out = torch.empty_like(case.query)
    step = step_of(cuda, case, out)
    step()
    with watched() as waits:
        step()
    assert waits == []


def test_a_wait_is_detected(cuda: Backend) -> None:
    """Validates the previous test."""
    with watched() as waits:
        torch.ones(1, device="cuda:0").item()
    assert len(waits) == 1


def test_a_captured_step_follows_its_inputs(cuda: Backend, case: Case) -> None:
    """Shorter contexts in the same buffers: no launch parameter depends on their lengths."""
    out = torch.empty_like(case.query)
    graph = cuda.runtime.capture(step_of(cuda, case, out))
    case.batch.context_lens.fill_(33)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    batch = replace(case.batch, host_context_lens=(33,) * 3)
    wanted = oracle.decode_attention(case.query, case.kv.key, case.kv.value, batch, 0.1)
    assert_same(out, wanted, "bfloat16")


def test_memory_is_flat(cuda: Backend, case: Case) -> None:
    out = torch.empty_like(case.query)
    step = step_of(cuda, case, out)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(2000):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
