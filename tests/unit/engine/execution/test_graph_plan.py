"""The graph plan: which steps are replayed from graphs, and the captured sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.graph_plan import (
    GraphPlan,
    decode_sizes,
    piecewise_sizes,
    plan_graphs,
    thinned,
)
from mooncake_hal_cpu.cpu_backend import CpuBackend
from mooncake_kv.config import KVTransferConfig

CONFIG = EngineConfig(Path(), max_num_seqs=17)
LAYERS = 32


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.fixture
def device(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    """A backend whose device is not the host."""
    monkeypatch.setattr(backend.runtime, "device", lambda index: torch.device("meta", index))
    backend.capabilities = replace(backend.capabilities, max_decodes_per_graph=None)
    return backend


def test_decode_sizes_grow_to_the_largest_step() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(6) == (1, 2, 4, 6)
    assert decode_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_sizes(256)[-2:] == (240, 256)
    assert decode_sizes(300)[-3:] == (256, 288, 300)


@pytest.mark.parametrize("largest", [1, 5, 8, 31, 32, 33, 100, 512, 2000])
def test_piecewise_steps_have_little_padding(largest: int) -> None:
    sizes = piecewise_sizes(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 28
    for count in range(1, largest + 1):
        fitting = min(size for size in sizes if size >= count)
        assert fitting - count <= max(15, count // 4)


def test_piecewise_graphs_can_be_disabled() -> None:
    assert piecewise_sizes(0) == ()


def test_each_padding_token_has_a_slot() -> None:
    assert GraphPlan().scratch_blocks(16) == 0
    assert GraphPlan((1, 2, 17)).scratch_blocks(16) == 2
    assert GraphPlan((), (8, 16, 64)).scratch_blocks(16) == 3
    assert GraphPlan((), (1,)).scratch_blocks(16) == 1
    assert GraphPlan((1, 2, 49), (8, 16, 64)).scratch_blocks(16) == 4


def test_host_replays_small_decode_steps(backend: CpuBackend) -> None:
    assert plan_graphs(CONFIG, backend, LAYERS) == GraphPlan(decode_sizes(17), ())
    assert plan_graphs(CONFIG, backend, LAYERS, has_experts=True) == GraphPlan()
    many = replace(CONFIG, max_num_seqs=256)
    assert plan_graphs(many, backend, LAYERS).decode_sizes == decode_sizes(32)
    asked = replace(CONFIG, piecewise_graph_max_tokens=100)
    assert plan_graphs(asked, backend, LAYERS) == GraphPlan(decode_sizes(17), piecewise_sizes(100))


def test_device_replays_prompts_piecewise(device: CpuBackend) -> None:
    many = replace(CONFIG, max_num_seqs=256)
    assert plan_graphs(many, device, LAYERS) == GraphPlan(decode_sizes(256), piecewise_sizes(512))
    short = replace(CONFIG, max_num_batched_tokens=300)
    assert plan_graphs(short, device, LAYERS).piecewise_sizes == piecewise_sizes(300)
    without = replace(CONFIG, piecewise_graph_max_tokens=0)
    assert plan_graphs(without, device, LAYERS) == GraphPlan(decode_sizes(17))


def test_each_role_captures_only_the_steps_it_runs(device: CpuBackend) -> None:
    kv = KVTransferConfig()
    prefill = replace(CONFIG, role=Role.PREFILL, kv_transfer=kv)
    assert plan_graphs(prefill, device, LAYERS) == GraphPlan((), piecewise_sizes(512))
    decode = replace(CONFIG, role=Role.DECODE, kv_transfer=kv)
    assert plan_graphs(decode, device, LAYERS) == GraphPlan(decode_sizes(17), piecewise_sizes(512))
    for without in (replace(CONFIG, enforce_eager=True), replace(CONFIG, pp_size=2)):
        assert plan_graphs(without, device, LAYERS) == GraphPlan()
    device.capabilities = replace(device.capabilities, graphs=False)
    assert plan_graphs(CONFIG, device, LAYERS) == GraphPlan()


def test_experts_divided_over_ranks_are_not_captured(device: CpuBackend) -> None:
    divided = replace(CONFIG, tp_size=2, ep_size=2)
    in_pieces = GraphPlan((), piecewise_sizes(512))
    assert plan_graphs(divided, device, LAYERS, has_experts=True) == in_pieces
    device.capabilities = replace(device.capabilities, moe_graphs=False)
    assert plan_graphs(divided, device, LAYERS, has_experts=True) == in_pieces
    assert plan_graphs(replace(divided, pp_size=2), device, LAYERS, has_experts=True) == GraphPlan()


def test_sizes_are_thinned_evenly() -> None:
    sizes = tuple(range(1, 11))
    assert thinned(sizes, 10) == thinned(sizes, 99) == sizes
    assert thinned(sizes, 5) == (2, 4, 6, 8, 10)
    assert thinned(sizes, 3) == (3, 6, 10)
    assert thinned(sizes, 1) == (10,)
    assert thinned(sizes, 0) == thinned(sizes, -4) == thinned((), 3) == ()


@pytest.mark.parametrize("layers", [2, 32, 61, 94])
def test_number_of_graphs_is_bounded_by_the_backend(device: CpuBackend, layers: int) -> None:
    device.capabilities = replace(device.capabilities, max_graphs=600)
    plan = plan_graphs(CONFIG, device, layers)
    assert plan.decode_sizes == decode_sizes(17)
    assert plan.piecewise_sizes[-1] == 512
    held = len(plan.decode_sizes) + (layers + 1) * len(plan.piecewise_sizes)
    assert 500 < held <= 600 or plan.piecewise_sizes == piecewise_sizes(512)


def test_negative_size_is_rejected() -> None:
    with pytest.raises(ConfigError, match="piecewise_graph_max_tokens must not be negative"):
        EngineConfig(Path(), piecewise_graph_max_tokens=-1)
