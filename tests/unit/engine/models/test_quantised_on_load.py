"""Weights quantised on load equal, bit for bit, those of a checkpoint that was quantised
beforehand, for the columns of each rank. Ranks of experts are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import random_model, write_checkpoint
from support.forward_steps import run
from support.fp8_checkpoints import quantise, write_fp8
from support.thread_ranks import on_ranks
from support.two_linears import TwoLinears

from mooncake_engine.errors import CheckpointError
from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.models import fp8_weights
from mooncake_engine.models.catalog import build_model, read_model_config
from mooncake_engine.models.fp8_weights import (
    Fp8Experts,
    Fp8Linears,
    Fp8LinearWeight,
    QuantizingShard,
)
from mooncake_engine.models.layers import (
    DenseWeight,
    ParallelContext,
    RowLinear,
)
from mooncake_engine.models.quantization_config import FP8_ON_LOAD
from mooncake_hal.backend import Communicator
from mooncake_hal.fp8_linear import Fp8Weight
from mooncake_hal.reference import ReferenceOps

IN, WIDE = 64, 96
ROWS = {"gate": 128, "up": 128}
MOE = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 64, "num_experts": 4}


def make_layers(parallel: ParallelContext) -> TwoLinears:
    return TwoLinears(parallel, ROWS, (IN, WIDE), FP8_ON_LOAD.is_scale)


def context(group: Any = None, dtype: torch.dtype = torch.bfloat16) -> ParallelContext:
    kept = Fp8Linears(FP8_ON_LOAD, keeps_experts=True)
    device = torch.device("cpu")
    return ParallelContext(ReferenceOps(), device, dtype, communicator=group, quantization=kept)


def write(directory: Path, *, make: Callable[..., torch.Tensor] = torch.randn) -> dict[str, Any]:
    """Write a checkpoint of the layers in bfloat16; return its weights."""
    torch.manual_seed(0)
    shapes = {**{name: (rows, IN) for name, rows in ROWS.items()}, "down": (IN, WIDE)}
    weights = {name: make(*shape).bfloat16() for name, shape in shapes.items()}
    save_file({f"{name}.weight": w for name, w in weights.items()}, directory / "model.safetensors")
    return weights


def check(weight: Fp8Weight, *parts: torch.Tensor) -> None:
    """Check that a weight consists of stacked parts, each quantised alone."""
    whole = [quantise(part.float(), "channel") for part in parts]
    wanted = torch.cat([values.float() for values, _ in whole])
    assert weight.values.dtype is torch.float8_e4m3fn
    assert torch.equal(weight.values.float(), wanted)
    assert torch.equal(weight.scales, torch.cat([scales.flatten() for _, scales in whole]))


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 32 << 20])
@pytest.mark.parametrize("ranks", [1, 2])
def test_row_scales_cover_the_columns_of_the_rank(
    tmp_path: Path, ranks: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows quantised at once."""
    monkeypatch.setattr(fp8_weights, "_CHUNK_BYTES", chunk_bytes)
    weights = write(tmp_path)
    for rank in range(ranks):
        group = SimpleNamespace(rank=rank, world_size=ranks) if ranks > 1 else None
        parallel = context(group)
        layers = make_layers(parallel)
        load_weights(cast(Any, layers), tmp_path)
        shares = [(weights[name], parallel.share(rows)) for name, rows in ROWS.items()]
        fused = cast(Fp8LinearWeight, layers.fused._weight)._weight
        check(fused, *(whole[own.start : own.stop] for whole, own in shares))
        own = parallel.share(WIDE)
        divided = cast(Fp8LinearWeight, layers.divided._weight)._weight
        check(divided, weights["down"][:, own.start : own.stop])


def test_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    write(tmp_path, make=torch.zeros)
    layers = make_layers(context())
    load_weights(cast(Any, layers), tmp_path)
    weight = cast(Fp8LinearWeight, layers.divided._weight)._weight
    assert not weight.values.float().any()
    assert weight.scales.isfinite().all()


def test_weights_are_quantised_from_the_models_dtype(tmp_path: Path) -> None:
    """From the values that the unquantised model would use."""
    exact = write(tmp_path)["down"].float() * 1.001
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "down.weight": exact}, path)
    for dtype in (torch.bfloat16, torch.float32):
        layers = make_layers(context(dtype=dtype))
        load_weights(cast(Any, layers), tmp_path)
        check(cast(Fp8LinearWeight, layers.divided._weight)._weight, exact.to(dtype))


def test_layer_of_an_unsupported_size_stays_unquantised(caplog: pytest.LogCaptureFixture) -> None:
    layer = RowLinear(context(), "down", context().share(WIDE), (IN + 8, WIDE))
    assert isinstance(layer._weight, DenseWeight)
    assert layer._weight.values.shape == (IN + 8, WIDE)
    assert "some weights are not quantised, the first is down" in caplog.text


def test_scale_in_an_unquantised_checkpoint_is_unexpected(tmp_path: Path) -> None:
    """A tensor named like a scale is as unexpected as without quantisation."""
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "down.weight_scale": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"does not account for: down\.weight_scale"):
        load_weights(cast(Any, make_layers(context())), tmp_path)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_of_all_ranks_are_quantised_alike(tmp_path: Path, ep_size: int) -> None:
    """Slices of all experts, whose columns have scales of their own, or some whole experts."""
    model = write_checkpoint(random_model("qwen3_moe", **MOE, dtype="bfloat16"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")

    def check_rank(group: Communicator) -> None:
        parallel = ParallelContext(
            ReferenceOps(),
            torch.device("cpu"),
            torch.bfloat16,
            communicator=group,
            ep_size=ep_size,
            quantization=Fp8Linears(FP8_ON_LOAD, keeps_experts=True),
        )
        names = [
            tuple(f"model.layers.0.mlp.experts.{n}.{part}_proj" for part in ("gate", "up", "down"))
            for n in range(4)
        ]
        held = range(4) if ep_size == 1 else range(2 * group.rank, 2 * group.rank + 2)
        own = parallel.inner_share(64)
        assert parallel.quantization is not None
        made = parallel.quantization.make_experts(parallel, cast(Any, names), held, (64, 64))
        assert isinstance(made, Fp8Experts)
        load_weights(cast(Any, OfExperts(made)), model)
        for index, expert in enumerate(held):
            gate, up, down = (tensors[f"{name}.weight"] for name in names[expert])
            part, weights = slice(own.start, own.stop), made._weights
            check(fp8_weights._of_expert(weights["gate_up"], index), gate[part], up[part])
            check(fp8_weights._of_expert(weights["down"], index), down[:, part])

    on_ranks(2, check_rank)


class OfExperts:
    """A model of experts only, for a checkpoint that has more."""

    tied_head = None

    def __init__(self, experts: Fp8Experts) -> None:
        self.weight_shards = experts.weight_shards
        self.process_weights_after_loading = experts.process_weights_after_loading

    def is_ignored(self, name: str) -> bool:
        return True


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe"])
def test_logits_equal_those_of_the_prequantised_model(tmp_path: Path, family: str) -> None:
    """With separate or fused linear layers in the checkpoint."""
    plain = write_checkpoint(random_model(family, num_hidden_layers=1), tmp_path / "plain")
    model = write_fp8(plain, tmp_path / "model", "channel")[0]
    config = read_model_config(model).quantization
    assert config is not None
    parallel = context(dtype=torch.float32)
    beforehand = replace(parallel, quantization=Fp8Linears(config, keeps_experts=True))
    both = (run(plain, parallel)[0], run(model, beforehand)[0])
    assert all(torch.equal(*step) for step in zip(*both, strict=True))


def test_latent_attention_keeps_reordered_weights_unquantised(tmp_path: Path) -> None:
    plain = write_checkpoint(random_model("deepseek_v3", num_hidden_layers=2), tmp_path / "plain")
    logits, made = run(plain, context(dtype=torch.float32))
    assert all(step.isfinite().all() for step in logits)
    quantised = {s.name for s in made.weight_shards() if isinstance(s, QuantizingShard)}
    linears = {name.split(".self_attn.")[1] for name in quantised if ".self_attn." in name}
    assert linears <= {"o_proj.weight", "q_a_proj.weight"}
    assert any(".shared_experts." in name for name in quantised)


def test_only_linears_and_experts_are_quantised_to_half_the_memory(
    tmp_path: Path,
) -> None:
    """One byte per value and four per row; embeddings, head, norms and routers are unchanged."""
    model = write_checkpoint(random_model("qwen3_moe", **MOE, dtype="bfloat16"), tmp_path / "model")
    shards = list(build_model(read_model_config(model), context(), 64).weight_shards())
    quantised = [shard for shard in shards if isinstance(shard, QuantizingShard)]
    plain = {shard.name for shard in shards if shard not in quantised}
    assert all(shard.target.element_size() == 1 for shard in quantised)
    assert all(shard.scales.shape == shard.target.shape[:1] for shard in quantised)
    assert len(quantised) == 4 + 3 * 4
    parts = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
    assert all(any(part in name for part in parts) for name in plain)
