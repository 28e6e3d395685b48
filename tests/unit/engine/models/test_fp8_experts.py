"""Experts of fp8 checkpoints kept in fp8, on one rank and divided over ranks, give the logits of
the same values unquantised. The ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.forward_steps import run
from support.fp8_checkpoints import edit_config, write_fp8
from support.thread_ranks import on_ranks
from torch import Tensor

from mooncake_engine.models.catalog import build_model, read_model_config
from mooncake_engine.models.expert_placement import ExpertRanks, place_experts
from mooncake_engine.models.fp8_weights import Fp8Linears
from mooncake_engine.models.layers import ParallelContext
from mooncake_hal.backend import Communicator
from mooncake_hal.fp8_linear import Fp8Weight
from mooncake_hal.reference import dequantised
from mooncake_hal_cpu.torch_ops import TorchOps

FIELDS = {"hidden_size": 128, "num_hidden_layers": 2}
"""The hidden size is one block; experts are two blocks wide, so that two ranks have one each."""
INNER = {"mixtral": "intermediate_size"}
KEPT = ("tensor", "blocks", "channel")


class ExactOps(TorchOps):
    """Ops that multiply fp8 weights by unquantised inputs, to compare with dequantised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_weights: set[torch.Size] = set()

    def pack_fp8_weight(self, weight: Fp8Weight) -> Fp8Weight:
        return weight

    def fp8_linear(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        wide = x @ dequantised(weight).T
        return wide if bias is None else wide + bias

    def pack_fp8_experts(self, weights: Fp8Weight) -> Fp8Weight:
        self.fp8_weights.add(weights.values.shape)
        return weights

    def unpack_fp8_experts(self, packed: Fp8Weight) -> Fp8Weight:
        return packed

    def fp8_moe(
        self,
        x: Tensor,
        gate_up: Fp8Weight,
        down: Fp8Weight,
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        packed = (self.pack_experts(dequantised(weight)) for weight in (gate_up, down))
        return self.moe(x, *packed, expert_ids, expert_weights)


def alone(model: Path) -> ParallelContext:
    quantization = read_model_config(model).quantization
    kept = None if quantization is None else Fp8Linears(quantization, keeps_experts=True)
    return ParallelContext(ExactOps(), torch.device("cpu"), torch.float32, quantization=kept)


def divided(model: Path, group: Communicator, ep_size: int, least: int) -> ParallelContext:
    sizes = {"ep_size": ep_size, "ep_dispatch_min_tokens": least}
    return replace(alone(model), communicator=group, **sizes)


def shapes_in_fp8(parallel: ParallelContext) -> set[torch.Size]:
    assert isinstance(parallel.ops, ExactOps)
    return parallel.ops.fp8_weights


def write(tmp_path: Path, family: str, form: str) -> tuple[Path, list[Tensor]]:
    """Write a checkpoint; return it, and the logits of its dequantised twin."""
    fields = {**FIELDS, INNER.get(family, "moe_intermediate_size"): 256}
    plain = write_checkpoint(random_model(family, **fields), tmp_path / "plain")
    model, twin = write_fp8(plain, tmp_path / "model", form)
    return model, run(twin, alone(twin))[0]


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for step, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(step, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", KEPT)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_single_rank_keeps_experts_in_fp8(tmp_path: Path, family: str, form: str) -> None:
    model, expected = write(tmp_path, family, form)
    parallel = alone(model)
    compare(run(model, parallel)[0], expected)
    moe = read_model_config(model).moe
    assert moe is not None
    count = moe.routing.num_experts
    assert shapes_in_fp8(parallel) == {(count, 512, 128), (count, 128, 256)}


@pytest.mark.parametrize("form", ["blocks", "channel"])
@pytest.mark.parametrize(
    ("ranks", "ep_size", "least"), [(2, 1, 1), (2, 2, 1), (2, 2, 1000), (4, 2, 1)]
)
def test_ranks_have_their_part_of_values_and_scales(
    tmp_path: Path, form: str, ranks: int, ep_size: int, least: int
) -> None:
    """A slice of every expert, some whole experts, or slices of some."""
    model, expected = write(tmp_path, "qwen3_moe", form)

    def rank(group: Communicator) -> tuple[list[Tensor], set[torch.Size]]:
        parallel = divided(model, group, ep_size, least)
        return run(model, parallel)[0], shapes_in_fp8(parallel)

    count, inner = 8 // ep_size, 256 * ep_size // ranks
    for found, kept in on_ranks(ranks, rank):
        compare(found, expected)
        assert kept == {(count, 2 * inner, 128), (count, 128, inner)}


@pytest.mark.parametrize("form", ["blocks", "channel"])
@pytest.mark.parametrize(("ranks", "ep_size"), [(2, 2), (4, 2)])
def test_scales_move_with_experts(tmp_path: Path, form: str, ranks: int, ep_size: int) -> None:
    """They move after two of the steps; busy experts have replicas."""
    model, expected = write(tmp_path, "qwen3_moe", form)
    before = place_experts([9, 1, 1, 9, 1, 1, 1, 1], 10, ExpertRanks(ep_size))
    size = 10 // ep_size
    after = (*before[size:], *before[:size])

    def rank(group: Communicator) -> tuple[list[Tensor], int]:
        parallel = replace(divided(model, group, ep_size, 1), expert_slots=(before,) * 2)
        logits, made = run(model, parallel, after)
        return logits, sum(counts.num_moved for counts in made.expert_counts.values())

    for found, num_moved in on_ranks(ranks, rank):
        compare(found, expected)
        assert num_moved > 0


def test_fp8_experts_take_the_memory_of_the_checkpoint(tmp_path: Path) -> None:
    """One byte per value plus the scales; bfloat16 takes two bytes per value."""
    model, _ = write(tmp_path, "qwen3_moe", "blocks")

    def expert_bytes(parallel: ParallelContext) -> int:
        parallel = replace(parallel, dtype=torch.bfloat16)
        made = build_model(read_model_config(model), parallel, 64)
        targets = [shard.target for shard in made.weight_shards() if ".experts." in shard.name]
        return sum(target.numel() * target.element_size() for target in targets)

    numbers, blocks = 2 * 8 * 3 * 128 * 256, 2 * 8 * 3 * 2
    assert expert_bytes(alone(model)) == numbers + 4 * blocks
    assert expert_bytes(replace(alone(model), quantization=None)) == 2 * numbers


def test_slices_of_partial_blocks_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By every rank, each of which logs it once."""
    model, expected = write(tmp_path, "qwen3_moe", "blocks")

    def rank(group: Communicator) -> tuple[list[Tensor], set[torch.Size]]:
        parallel = divided(model, group, 1, 1)
        return run(model, parallel)[0], shapes_in_fp8(parallel)

    for found, kept in on_ranks(4, rank):
        compare(found, expected)
        assert not kept
    assert "some fp8 weights are dequantised while they are loaded" in caplog.text


def test_experts_with_input_scales_are_dequantised(tmp_path: Path) -> None:
    """The engine plan has configured ``Fp8Linears`` so; the input scales are not loaded."""
    model, expected = write(tmp_path, "qwen3_moe", "static")
    quantization = read_model_config(model).quantization
    assert quantization is not None
    parallel = replace(alone(model), quantization=Fp8Linears(quantization))
    compare(run(model, parallel)[0], expected)
    assert not shapes_in_fp8(parallel)


def test_layer_with_an_unquantised_linear_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks, whichever experts each one holds."""
    model, _ = write(tmp_path, "qwen3_moe", "blocks")
    ignored = "model.layers.0.mlp.experts.7.down_proj"

    def ignore(config: dict[str, object]) -> None:
        fields = config["quantization_config"]
        assert isinstance(fields, dict)
        fields["modules_to_not_convert"] = [ignored]

    edit_config(model, ignore)
    parallel = alone(model)
    names = [
        (f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")
        for prefix in (f"model.layers.0.mlp.experts.{expert}" for expert in range(8))
    ]
    assert parallel.quantization is not None
    assert parallel.quantization.make_experts(parallel, names, (0, 1), (128, 256)) is None
    assert f"{ignored} of the same layer is not quantised" in caplog.text
    others = [tuple(name.replace("layers.0", "layers.1") for name in each) for each in names]
    made = parallel.quantization.make_experts(parallel, others, (0, 1), (128, 256))
    assert made is not None
