"""Copies to and from host memory overlap with steps; a step waits only for blocks that it uses."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mooncake_engine.kv_cache.block_copier import BlockCopier
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize
from mooncake_engine.scheduling.step_plan import ScheduledSequence, StepPlan
from mooncake_hal.backend import Fence
from mooncake_hal.backend_parts import CopyThread
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal_cpu.cpu_backend import CpuBackend

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 1, (2, 2), "float32", 4)
BLOCKS, BLOCK_SIZE = 200, 2
SECONDS = 60.0


class GatedStream(CopyThread):
    """A copy thread that starts each piece of work only when the test opens its gate."""

    def __init__(self) -> None:
        super().__init__("gated")
        self.gates: list[threading.Event] = []

    def submit(self, work: Callable[[], object]) -> Fence:
        gate = threading.Event()
        self.gates.append(gate)

        def run() -> None:
            assert gate.wait(SECONDS)
            work()

        return super().submit(run)

    def open(self) -> None:
        for gate in self.gates:
            gate.set()


@pytest.fixture
def pool() -> Iterator[KVCacheMemory]:
    size = KVCacheSize(BLOCKS, BLOCK_SIZE)
    made = KVCacheMemory(
        CpuBackend(), 0, GEOMETRY, shard_of(GEOMETRY, 1, 0), size, layout_name="LPBTH"
    )
    for index in range(2):
        for plane in made.layer(index):
            plane.copy_(torch.arange(BLOCKS).view(-1, 1, 1, 1).expand_as(plane))
    yield made
    made.close()


@pytest.fixture
def stream() -> Iterator[GatedStream]:
    made = GatedStream()
    yield made
    made.open()
    made.close()


@pytest.fixture
def copier(pool: KVCacheMemory, stream: GatedStream) -> BlockCopier:
    return BlockCopier(pool, BLOCKS, CpuBackend().ops, torch.device("cpu"), stream)


def held(pool: KVCacheMemory, block_id: int) -> set[float]:
    return {
        value
        for index in range(2)
        for plane in pool.layer(index)
        for value in plane[block_id].flatten().tolist()
    }


def test_host_memory_of_a_device_is_not_page_locked(
    pool: KVCacheMemory, stream: GatedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocators of page-locked memory round up to a power of two."""
    allocate, allocated = torch.empty, Counter[bool]()

    def watched(count: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        allocated[pin_memory] += count
        return allocate(count, **options)

    monkeypatch.setattr(torch, "empty", watched)
    BlockCopier(pool, 3, CpuBackend().ops, torch.device("cuda"), stream)
    elements = sum(plane[:3].numel() for index in range(2) for plane in pool.layer(index))
    assert allocated == {False: elements}


def test_step_without_copied_blocks_does_not_wait(
    pool: KVCacheMemory, copier: BlockCopier, stream: GatedStream
) -> None:
    copier.copy(StepPlan(0, swap_outs=tuple((block, block) for block in range(4))))
    assert copier.is_copying
    copier.copy(StepPlan(1, sequences=(ScheduledSequence("a", 0, 1, (7,)),)))
    assert copier.is_copying
    stream.open()
    copier.drain()
    assert not copier.is_copying


def test_step_waits_only_for_copies_of_its_blocks(
    pool: KVCacheMemory, copier: BlockCopier, stream: GatedStream
) -> None:
    """150 blocks are swapped out, of which the step needs the last: that one is copied first."""
    taken = ScheduledSequence("a", 0, 1, (149,))
    plan = StepPlan(0, swap_outs=tuple((b, b) for b in range(150)), sequences=(taken,))
    step = threading.Thread(target=copier.copy, args=(plan,))
    step.start()
    while not stream.gates:
        assert step.is_alive()
    stream.gates[0].set()
    step.join(SECONDS)
    assert not step.is_alive(), "the step waits for all copies"
    assert len(stream.gates) == 1 + 3
    for index in range(2):
        for plane in pool.layer(index):
            plane[149] = -1.0
    stream.open()
    copier.drain()
    back = StepPlan(1, swap_ins=((149, 160), (0, 161)), drains_copies=True)
    stream.gates.clear()
    stream.submit = CopyThread.submit.__get__(stream)  # type: ignore[method-assign]  # no gates
    copier.copy(back)
    assert (held(pool, 160), held(pool, 161)) == ({149.0}, {0.0})


def test_copy_error_is_raised_in_the_waiting_step(copier: BlockCopier) -> None:
    copier._stream = CopyThread("failing")
    with pytest.raises((IndexError, RuntimeError)):
        copier.copy(StepPlan(0, swap_ins=((BLOCKS + 5, 3),), drains_copies=True))
    copier.close()
