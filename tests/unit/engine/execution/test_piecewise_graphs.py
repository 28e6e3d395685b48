"""Piecewise graphs of steps with prompts: results, KV writes, and the hooks called per layer.

A real model runs on the CPU backend's graphs, and is compared with its eager execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.pd import prompt_of, write_model
from support.thread_ranks import on_ranks
from torch import Tensor

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.graph_runners import PiecewiseGraphRunner
from mooncake_engine.execution.input_batch import ForwardInputs, ScheduledTokens, lay_out
from mooncake_engine.execution.parallel_state import PipelineStage, StageRunner
from mooncake_engine.execution.request_table import BlockTables
from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize
from mooncake_engine.models.catalog import Model, build_model
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend import Communicator, Graph
from mooncake_hal.errors import CapabilityError
from mooncake_hal.kv.geometry import shard_of
from mooncake_hal_cpu.cpu_backend import CpuBackend

BLOCK, SIZES = 16, (8, 24, 32)
DISPATCHED = 10
"""Minimum tokens of a dispatched step, if experts are divided over ranks."""
BLOCKS_PER_ROW, ROWS = 4, 3
CPU = torch.device("cpu")


class Counting:
    """The CPU's runtime, which counts captured graphs, or raises ``refusal`` if set."""

    def __init__(self, backend: CpuBackend) -> None:
        self._runtime = backend.runtime
        self.num_captured = 0
        self.refusal: Exception | None = None

    def capture(self, run: Callable[[], None]) -> Graph:
        if self.refusal is not None:
            raise self.refusal
        self.num_captured += 1
        return self._runtime.capture(run)


@dataclass
class Rig:
    """One model over two KV caches: run eagerly, and in piecewise graphs."""

    model: Model
    plain: PipelineStage
    pieces: PiecewiseGraphRunner
    pools: tuple[KVCacheMemory, KVCacheMemory]
    runtime: Counting

    def run(self, step: ForwardInputs, fired: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Run the step both ways; return the hidden rows of each."""
        listener = None if fired is None else fired.append
        rows = []
        stages: tuple[StageRunner, StageRunner] = (self.plain, self.pieces)
        with torch.inference_mode():
            for stage, pool in zip(stages, self.pools, strict=True):
                context = ForwardContext(step.attention, pool.layers, listener)
                hidden = stage.forward(step.token_ids, step.positions, context)
                assert hidden is not None
                rows.append(hidden.clone())
        return rows[0], rows[1]

    def kv(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the contents of the requests' blocks in both pools."""
        first, second = self.pools
        blocks = first.num_blocks
        return (
            [layer[:blocks] for plane in first.planes for layer in plane],
            [layer[:blocks] for plane in second.planes for layer in plane],
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.fixture
def rig(folder: Path) -> Iterator[Rig]:
    with rig_of(folder, None) as made:
        yield made


@contextmanager
def rig_of(folder: Path, group: Communicator | None, ep_size: int = 1) -> Iterator[Rig]:
    """Create the rig of a rank, with experts divided over the ranks of the group."""
    backend = CpuBackend()
    setup = make_plan(EngineConfig(folder, dtype="float32"), backend)
    parallel = ParallelContext(
        backend.ops, CPU, setup.dtype, group, ep_size=ep_size, ep_dispatch_min_tokens=DISPATCHED
    )
    model = build_model(setup.model, parallel, setup.max_model_len)
    load_weights(model, folder)
    size = KVCacheSize(ROWS * BLOCKS_PER_ROW, BLOCK, num_scratch_blocks=1)
    shard = shard_of(setup.geometry, parallel.tp_size, parallel.tp_rank)
    pools = (
        KVCacheMemory(backend, 0, setup.geometry, shard, size, layout_name=setup.layout_name),
        KVCacheMemory(backend, 0, setup.geometry, shard, size, layout_name=setup.layout_name),
    )
    plain, runtime = PipelineStage(model, parallel, setup.model.hidden_size), Counting(backend)
    parts = (plain, model, parallel, pools[1], runtime)
    pieces = PiecewiseGraphRunner(*parts, sizes=SIZES, hidden_size=setup.model.hidden_size)  # type: ignore[arg-type]  # capture alone
    yield Rig(model, plain, pieces, pools, runtime)
    for pool in pools:
        pool.close()


def step_of(*shares: tuple[int, int, int]) -> ForwardInputs:
    """Return a step of (row, start, count) shares; each row has blocks of its own."""
    tables = BlockTables(ROWS, BLOCKS_PER_ROW, CPU, is_accelerator=False)
    for row in range(ROWS):
        tables.take_row(tuple(range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW)))
    columns = ScheduledTokens([row for row, _, _ in shares], *_columns(shares))
    tokens = [token for row, start, count in shares for token in prompt_of(count, 9 * row + start)]
    return lay_out(columns, tokens, tables, BLOCK, CPU)


def _columns(shares: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    return [start for _, start, _ in shares], [count for _, _, count in shares]


STEPS = (
    step_of((0, 0, 7)),
    step_of((1, 0, 20)),
    step_of((0, 7, 1), (1, 20, 1), (2, 0, 5)),  # decodes beside a prompt
    step_of((0, 8, 1), (2, 5, 23)),
    step_of((1, 21, 8), (2, 28, 16)),
    step_of((0, 9, 29)),
)


def test_piecewise_steps_equal_eager_steps(rig: Rig) -> None:
    for step in STEPS * 2:  # captured the first time, replayed the second
        plain, replayed = rig.run(step)
        torch.testing.assert_close(replayed, plain)
        for wanted, found in zip(*rig.kv(), strict=True):
            torch.testing.assert_close(found, wanted)
    assert rig.runtime.num_captured == 4 * len(SIZES)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_of_other_ranks_are_launched_between_pieces(family: str, tmp_path: Path) -> None:
    """In dispatched steps, smaller ones, and decodes; DeepSeek's first layer is dense."""
    model = write_checkpoint(random_model(family), tmp_path)
    steps = (*STEPS, step_of((0, 38, 1), (1, 29, 1)))

    def rank(group: Communicator) -> None:
        with rig_of(model, group, ep_size=2) as rig:
            for step in steps * 2:
                plain, replayed = rig.run(step)
                torch.testing.assert_close(replayed, plain)
                for wanted, found in zip(*rig.kv(), strict=True):
                    torch.testing.assert_close(found, wanted)
            assert rig.runtime.num_captured == 4 * len(SIZES)
            num_tokens = {sum(counts.tokens) for counts in rig.model.expert_counts.values()}
            tokens = 2 * sum(len(step.token_ids) for step in steps)
            assert num_tokens == {2 * tokens * 3}, "both runners count; padding chooses no experts"

    on_ranks(2, rank)


def test_all_sizes_are_captured_at_once(rig: Rig) -> None:
    before = [layer.clone() for layer in rig.kv()[1]]
    rig.pieces.capture()
    assert rig.runtime.num_captured == 4 * len(SIZES)
    for old, new in zip(before, rig.kv()[1], strict=True):
        assert torch.equal(new, old), "a request's block was written to"
    plain, replayed = rig.run(STEPS[0])
    torch.testing.assert_close(replayed, plain)
    assert rig.runtime.num_captured == 4 * len(SIZES)


def test_layer_hooks_fire_in_order(rig: Rig) -> None:
    fired: list[int] = []
    rig.run(STEPS[0], fired)
    assert fired == [0, 1, 2] * 2
    assert rig.runtime.num_captured == 4


def test_kv_of_a_layer_is_written_before_its_hook_fires(rig: Rig) -> None:
    step, pool = STEPS[0], rig.pools[1]
    slots = step.attention.slot_mapping
    found: list[bool] = []

    def listen(layer: int) -> None:
        (keys, _) = pool.layers[layer]
        found.append(bool(keys.flatten(0, 1)[slots].any()))

    context = ForwardContext(step.attention, pool.layers, listen)
    with torch.inference_mode():
        rig.pieces.forward(step.token_ids, step.positions, context)
        for plane in pool.planes:
            for layer in plane:
                layer.zero_()
        rig.pieces.forward(step.token_ids, step.positions, context)
    assert found == [True] * 6


def test_other_steps_run_eagerly(rig: Rig) -> None:
    for step in (step_of((0, 0, 33)), step_of((0, 33, 1), (1, 0, 1))):
        plain, same = rig.run(step)
        assert torch.equal(plain, same)
    assert rig.runtime.num_captured == 0
    rig.run(step_of((0, 33, 1), (1, 0, 1)), [])
    assert rig.runtime.num_captured == 4, "decodes with a layer hook run piecewise"


def test_uncapturable_steps_run_eagerly_or_are_reported(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.runtime.refusal = RuntimeError("moe waits for the device")
    with pytest.raises(ConfigError, match=r"prompts can't .* size 32: .*-graph-max-tokens 0"):
        rig.pieces.capture()
    rig.runtime.refusal = CapabilityError("experts are counted on the host")
    plain, same = rig.run(STEPS[0])
    assert torch.equal(plain, same)
    assert caplog.messages == [
        "steps with prompts run without graphs: experts are counted on the host"
    ]
