"""Decode graphs: sizes, input buffers, and padding that affects no request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.graph_plan import decode_sizes
from mooncake_engine.execution.graph_runners import DecodeGraphRunner
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend import AttentionBatch
from mooncake_hal.errors import CapabilityError
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal_cpu.cpu_backend import CpuBackend

GEOMETRY = KVGeometry(AttentionKind.GQA, 1, 1, (2, 2), "float32", 4)
BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS = 4, 2, 6, 3
SIZES = decode_sizes(MAX_SEQS)


@dataclass
class RerunGraph:
    """A graph that runs its work again on replay, on the current contents of its buffers."""

    run: Callable[[], None]
    lens: list[tuple[int, ...]] = field(default_factory=list)

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        self.lens.append(tuple(host_context_lens))
        self.run()


class RerunRuntime:
    """A runtime that captures by keeping the work; it has ``capture`` only."""

    def __init__(self) -> None:
        self.graphs: list[RerunGraph] = []
        self.refusal: Exception | None = None

    def capture(self, run: Callable[[], None]) -> RerunGraph:
        if self.refusal is not None:
            raise self.refusal
        run()
        self.graphs.append(RerunGraph(run))
        return self.graphs[-1]


class Stage:
    """Writes each token into its slot and records the step sizes; its output has a fixed
    address."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._rows: dict[int, Tensor] = {}

    def forward(self, token_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        batch = context.batch
        self.sizes.append(len(token_ids))
        for plane in context.kv[0]:
            flat = plane.view(-1, 2)
            assert len(set(batch.slot_mapping.tolist())) == len(token_ids), "a slot written twice"
            flat[batch.slot_mapping] = token_ids.float().unsqueeze(1)
        with torch.inference_mode():
            rows = self._rows.setdefault(len(token_ids), torch.empty(len(token_ids), 3))
            rows[:, 0], rows[:, 1] = token_ids, positions
            rows[:, 2] = batch.block_tables.sum(dim=1) + batch.context_lens
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden * 2


@pytest.fixture
def pool() -> Iterator[KVCacheMemory]:
    size = KVCacheSize(BLOCKS, BLOCK_SIZE, num_scratch_blocks=MAX_SEQS // BLOCK_SIZE)
    shard = shard_of(GEOMETRY, 1, 0)
    pool = KVCacheMemory(CpuBackend(), 0, GEOMETRY, shard, size, layout_name="LPBTH")
    yield pool
    pool.close()


@pytest.fixture
def runtime() -> RerunRuntime:
    return RerunRuntime()


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def graphs(pool: KVCacheMemory, runtime: RerunRuntime, stage: Stage) -> DecodeGraphRunner:
    return DecodeGraphRunner(stage, pool, runtime, SIZES, MAX_BLOCKS)  # type: ignore[arg-type]  # capture alone


def decodes(*tokens: int) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Return one token per sequence: the sequence in block i has i + 1 tokens of context."""
    count = len(tokens)
    lens = [1 + index % BLOCK_SIZE for index in range(count)]
    slots = [index * BLOCK_SIZE + length - 1 for index, length in enumerate(lens)]
    batch = AttentionBatch(
        num_decodes=count,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=torch.arange(count, dtype=torch.int32).unsqueeze(1),
        slot_mapping=torch.tensor(slots),
        block_size=BLOCK_SIZE,
        host_query_lens=(1,) * count,
        host_context_lens=tuple(lens),
    )
    return torch.tensor(tokens), torch.tensor(lens) - 1, batch


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_replay_equals_the_eager_step(
    graphs: DecodeGraphRunner, pool: KVCacheMemory, stage: Stage, count: int
) -> None:
    for first in (10, 20):
        token_ids, positions, batch = decodes(*range(first, first + count))
        before = [plane[0].clone() for plane in pool.planes]
        hidden = graphs.forward(token_ids, positions, ForwardContext(batch, pool.layers))
        assert hidden is not None
        assert hidden[:, 0].tolist() == token_ids.tolist()
        assert hidden[:, 1].tolist() == positions.tolist()
        assert graphs.logits(hidden)[0, 0] == 2 * first
        for plane, old in zip(pool.planes, before, strict=True):
            found, old = plane[0].view(-1, 2)[: BLOCKS * BLOCK_SIZE], old.view(-1, 2)
            wanted = old[: BLOCKS * BLOCK_SIZE].clone()
            wanted[batch.slot_mapping] = token_ids.float().unsqueeze(1)
            assert torch.equal(found, wanted), "a block of another request was written to"
    fitting = min(size for size in SIZES if size >= count)
    assert stage.sizes == [fitting] * 3, "captured once, replayed twice"


def test_host_lengths_equal_those_of_the_tensors(
    graphs: DecodeGraphRunner, pool: KVCacheMemory, runtime: RerunRuntime
) -> None:
    graphs.capture()
    for tokens in ((5, 6, 7, 8), (9, 9, 9)):
        token_ids, positions, batch = decodes(*tokens)
        graphs.forward(token_ids, positions, ForwardContext(batch, pool.layers))
        replayed = next(graph for graph in runtime.graphs if graph.lens)
        assert replayed.lens[-1] == tuple(graphs._batch.context_lens[:4].tolist())


def test_other_steps_run_eagerly(
    graphs: DecodeGraphRunner, pool: KVCacheMemory, stage: Stage
) -> None:
    token_ids, positions, batch = decodes(1, 2, 3)
    fired: list[int] = []
    watched = ForwardContext(batch, pool.layers, fired.append)
    graphs.forward(token_ids, positions, watched)
    mixed = replace(batch, num_decodes=2)
    graphs.forward(token_ids, positions, ForwardContext(mixed, pool.layers))
    assert stage.sizes == [3, 3]


def test_a_failed_capture_is_reported(pool: KVCacheMemory, runtime: RerunRuntime) -> None:
    runtime.refusal = RuntimeError("moe waits for the device")
    graphs = DecodeGraphRunner(Stage(), pool, runtime, SIZES, MAX_BLOCKS)  # type: ignore[arg-type]  # capture alone
    with pytest.raises(ConfigError, match=r"decodes .* size 6: moe waits .*: --enforce-eager"):
        graphs.capture()


def test_model_that_the_backend_cannot_capture_runs_eagerly(
    pool: KVCacheMemory, runtime: RerunRuntime, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refusal = CapabilityError("experts are counted on the host")
    graphs = DecodeGraphRunner(stage, pool, runtime, SIZES, MAX_BLOCKS)  # type: ignore[arg-type]  # capture alone
    for _ in range(2):
        token_ids, positions, batch = decodes(1, 2, 3)
        graphs.forward(token_ids, positions, ForwardContext(batch, pool.layers))
    assert stage.sizes == [3, 3]
    assert caplog.messages == [
        "steps of decodes run without graphs: experts are counted on the host"
    ]
