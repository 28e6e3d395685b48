"""With peers a step completes only when the device has finished it, even if it samples nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mooncake_engine.execution.async_model_runner import AsyncModelRunner, SampledTokenBuffer
from mooncake_engine.execution.model_runner import ModelRunner, RunnerParts
from mooncake_engine.execution.request_table import RequestTable
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.kv_cache.block_copier import BlockCopier
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.backend_parts import FinishedEvent
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal_cpu.cpu_backend import CpuBackend

GEOMETRY = KVGeometry(AttentionKind.GQA, 1, 1, (2, 2), "float32", 4)
BLOCKS, BLOCK_SIZE, VOCAB = 4, 2, 11
CPU = torch.device("cpu")
OURS, PEERS = 3.0, 99.0

PROMPT = NewRequest("a", (5, 6, 7, 8), 4, SamplingParams(temperature=0.0), 0, (1, 2))
CHUNK = StepPlan(
    0, new_requests=(PROMPT,), sequences=(ScheduledSequence("a", 0, 2, is_sampling=False),)
)
REST = StepPlan(1, sequences=(ScheduledSequence("a", 2, 2),))
SWAP_IN = StepPlan(0, swap_ins=((0, 1),), drains_copies=True)


class LateDevice:
    """A device that runs its queued work in order, and only when a caller waits for it."""

    def __init__(self) -> None:
        self.num_enqueued = 0
        self._work: deque[Callable[[], object]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._work

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self.num_enqueued += 1

    def finish(self, num_later: int = 0) -> None:
        """Do all but the last ``num_later`` pieces of work."""
        while len(self._work) > num_later:
            self._work.popleft()()

    def event(self) -> LateEvent:
        return LateEvent(self)


class LateEvent:
    """An event of a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._behind = 0

    def record(self) -> None:
        self._behind = self._device.num_enqueued

    def query(self) -> bool:
        raise NotImplementedError("steps wait for their ends, and never ask")

    def synchronize(self) -> None:
        self._device.finish(self._device.num_enqueued - self._behind)


class LateOps:
    """Ops that queue block copies on a late device; ``scatter_blocks`` only."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def scatter_blocks(self, staging: Tensor, plane: Tensor, block_ids: Tensor) -> None:
        ops = CpuBackend().ops
        self._device.enqueue(partial(ops.scatter_blocks, staging, plane, block_ids))


class InlineStream:
    """A stream that enqueues copies at once: the late device defers them."""

    def submit(self, work: Callable[[], object]) -> FinishedEvent:
        work()
        return FinishedEvent()

    def close(self) -> None:
        pass


class LateStage:
    """A stage that queues the writes of tokens' KV on a late device.

    Args:
        device: the device that runs the writes.
        is_last: whether this is the last stage, whose hidden states go to no other one.
    """

    def __init__(self, device: LateDevice, is_last: bool) -> None:
        self._device = device
        self._is_last = is_last

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        for plane in context.kv[0]:
            rows = plane.view(-1, 2)
            self._device.enqueue(partial(rows.index_fill_, 0, context.batch.slot_mapping, OURS))
        return token_ids.unsqueeze(1) if self._is_last else None

    def logits(self, hidden: Tensor) -> Tensor:
        self._device.finish()  # as reading a token back would
        return torch.zeros(len(hidden), VOCAB)


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def pool() -> Iterator[KVCacheMemory]:
    shard = shard_of(GEOMETRY, 1, 0)
    size = KVCacheSize(BLOCKS, BLOCK_SIZE)
    made = KVCacheMemory(CpuBackend(), 0, GEOMETRY, shard, size, layout_name="LPBTH")
    yield made
    made.close()


def make_runner(
    device: LateDevice, pool: KVCacheMemory, *, is_last: bool, is_fed: bool, has_peers: bool = True
) -> ModelRunner:
    requests = RequestTable(2, BLOCKS, VOCAB, CPU)
    ops: Any = LateOps(device)
    mover = BlockCopier(pool, 2, ops, CPU, InlineStream())
    stage = LateStage(device, is_last)
    parts = RunnerParts(
        stage, pool, requests, Sampler(()), mover, device.event, has_peers, lambda _: None
    )
    return (
        AsyncModelRunner(parts, SampledTokenBuffer(2, CPU, depth=2))
        if is_fed
        else ModelRunner(parts)
    )


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize(
    ("plan", "is_last"),
    [(CHUNK, True), (CHUNK, False), (SWAP_IN, True)],
    ids=["chunk", "chunk on an early stage", "swap-in alone"],
)
def test_freed_blocks_are_not_written_after_the_step(
    device: LateDevice, pool: KVCacheMemory, plan: StepPlan, is_last: bool, is_fed: bool
) -> None:
    """A request is aborted once its step has completed, and its block is reused for a load."""
    runner = make_runner(device, pool, is_last=is_last, is_fed=is_fed)
    pending = runner.launch(plan)
    assert not device.is_idle, "launch() must not wait for the device"
    assert pending.result().tokens == {}
    for plane in pool.layer(0):
        plane[1] = PEERS
    device.finish()
    for plane in pool.layer(0):
        assert plane[1].tolist() == [[[PEERS] * 2]] * BLOCK_SIZE


@pytest.mark.parametrize("is_fed", [False, True])
def test_step_without_peers_does_not_wait_for_the_device(
    device: LateDevice, pool: KVCacheMemory, is_fed: bool
) -> None:
    runner = make_runner(device, pool, is_last=True, is_fed=is_fed, has_peers=False)
    assert runner.launch(CHUNK).result().tokens == {}
    assert not device.is_idle, "the next chunk is queued after it on the device"


def test_completion_of_a_step_does_not_wait_for_the_next(
    device: LateDevice, pool: KVCacheMemory
) -> None:
    runner = make_runner(device, pool, is_last=False, is_fed=False)
    first, second = runner.launch(CHUNK), runner.launch(REST)
    first.result()
    assert not device.is_idle
    second.result()
    assert device.is_idle
