"""Stripes of a decode rank's blocks are read as contiguous runs and scattered by the NPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mooncake_hal.backend import Allocation, Memory
from mooncake_hal.testing.backends import load_backend
from mooncake_hal.transport import Spans
from mooncake_hal_ascend.ascend_backend import AscendMemory
from mooncake_hal_ascend.ascend_runtime import NpuSideStream
from mooncake_hal_ascend.hccs.hccs_staging import Scatterer, StagedReader

BLOCKS, TOKENS, PIECE = 40, 128, 256
STRIPE_BYTES = BLOCKS * TOKENS * PIECE


@pytest.fixture
def memory() -> Memory:
    return load_backend("ascend").memory


@pytest.fixture
def target(memory: Memory) -> Iterator[Allocation]:
    """Blocks with two ranks' heads; each rank has a stripe of every token."""
    made = memory.allocate(2 * STRIPE_BYTES, 0)
    yield made
    made.free()


@pytest.mark.parametrize("buffers_bytes", [64 << 10, 2 << 20, 64 << 20])
def test_stripes_are_scattered_and_other_memory_is_unchanged(
    memory: AscendMemory, target: Allocation, buffers_bytes: int
) -> None:
    source = torch.randint(0, 256, (STRIPE_BYTES,), dtype=torch.uint8)
    place = np.arange(BLOCKS * TOKENS, dtype=np.uint64) * np.uint64(PIECE)
    here = place * np.uint64(2) + np.uint64(target.region.address + PIECE)
    spans = Spans(here, place, np.full(len(place), PIECE, np.uint64))
    moves = []

    def read(wanted: Spans) -> None:
        """Read into NPU memory at an address, as an engine would."""
        moves.append(len(wanted))
        for local, remote, size in zip(*map(np.ndarray.tolist, _arrays(wanted)), strict=True):
            at = local - buffers.region.address
            buffers.tensor[at : at + size].copy_(source[remote : remote + size])

    buffers = memory.allocate(buffers_bytes, 0)
    staging = StagedReader(buffers.tensor, Scatterer(memory.tensor_at, NpuSideStream()), 1)
    assert staging.read(target.region, spans, read)
    assert len(moves) == -(-STRIPE_BYTES // (buffers_bytes // 2))
    assert set(moves) == {1}  # the peer's blocks are contiguous
    found = target.tensor.view(BLOCKS * TOKENS, 2, PIECE).cpu()
    assert torch.equal(found[:, 1].flatten(), source)
    assert not found[:, 0].any()
    buffers.free()


def test_unknown_memory_is_not_staged(memory: AscendMemory, target: Allocation) -> None:
    place = np.arange(TOKENS, dtype=np.uint64) * np.uint64(PIECE)
    base = np.uint64(target.region.address)
    spans = Spans(place * np.uint64(2) + base, place, np.full(TOKENS, PIECE, np.uint64))
    without_memory = Scatterer(lambda _: None, NpuSideStream())
    staging = StagedReader(torch.zeros(1 << 20, dtype=torch.uint8, device="npu"), without_memory, 1)
    assert not staging.read(target.region, spans, lambda _: pytest.fail("it was read"))


def _arrays(spans: Spans) -> tuple[np.ndarray, ...]:
    return spans.local, spans.remote, spans.nbytes


def test_freed_memory_is_not_found(memory: AscendMemory) -> None:
    made = memory.allocate(STRIPE_BYTES, 0)
    address = made.region.address
    assert memory.tensor_at(address) is made.tensor
    assert memory.allocation_around(address + 1) is made.tensor
    made.free()  # although references remain: the address may be reused
    assert memory.tensor_at(address) is None
    assert memory.allocation_around(address + 1) is None
