"""Linear layers of fp8 checkpoints: each rank's part gives equal results in fp8 or dequantised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from support.fp8_checkpoints import FORMS, dequantise, quantise
from support.two_linears import TwoLinears
from torch import Tensor

from mooncake_engine.errors import CheckpointError
from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.models.fp8_weights import Fp8Linears, Fp8LinearWeight
from mooncake_engine.models.layers import (
    ParallelContext,
    Span,
    linear_sources,
)
from mooncake_engine.models.quantization_config import SCALE_SUFFIXES, read_quantization
from mooncake_hal.fp8_linear import Fp8Weight
from mooncake_hal.reference import ReferenceOps, dequantised

IN, WIDE = 256, 512
ROWS = {"q": 256, "k": 128, "v": 128}
ONE_EACH = pytest.mark.parametrize("form", FORMS)


class ExactOps(ReferenceOps):
    """Ops that multiply fp8 weights by unquantised inputs, to compare with dequantised weights."""

    def fp8_linear(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return self.linear(x, dequantised(weight), bias)


def make_layers(parallel: ParallelContext) -> TwoLinears:
    def is_scale(name: str) -> bool:
        return name.endswith(SCALE_SUFFIXES)

    return TwoLinears(parallel, ROWS, (IN, WIDE), is_scale, has_bias=True)


def write(directory: Path, form: str) -> dict[str, Tensor]:
    """Write a checkpoint of the layers, with scales in a second file; return the dequantised
    weights."""
    generator = torch.Generator().manual_seed(0)
    weights, scales, meant = {}, {}, {}
    for name, shape in {**{n: (r, IN) for n, r in ROWS.items()}, "down": (IN, WIDE)}.items():
        plain = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1)
        weights[f"{name}.weight"], scale = quantise(plain, form)
        end = "weight_scale_inv" if form == "blocks" else "weight_scale"
        scales[f"{name}.{end}"] = scale.contiguous()
        meant[name] = dequantise(weights[f"{name}.weight"], scale, form)
        if form == "static":
            scales[f"{name}.input_scale"] = torch.tensor(0.5 + len(scales))
        weights[f"{name}.bias"] = meant[f"{name}.bias"] = torch.randn(shape[0])
    del weights["down.bias"]
    save_file(weights, directory / "model-1.safetensors")
    save_file(scales, directory / "model-2.safetensors")
    return meant


def context(rank: int, ranks: int, form: str, *, keeps: bool) -> ParallelContext:
    config = read_quantization(FORMS[form], "config.json")
    assert config is not None
    group: Any = SimpleNamespace(rank=rank, world_size=ranks) if ranks > 1 else None
    quantization = Fp8Linears(config) if keeps else None
    device = torch.device("cpu")
    return ParallelContext(
        ExactOps(), device, torch.float32, communicator=group, quantization=quantization
    )


@ONE_EACH
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dequantised"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_has_its_part_of_the_layers(
    tmp_path: Path, form: str, keeps: bool, ranks: int
) -> None:
    """Bit for bit the result of its rows and columns of the whole dequantised matrices."""
    meant, generator = write(tmp_path, form), torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, size, generator=generator) for size in (IN, WIDE))
    for rank in range(ranks):
        parallel = context(rank, ranks, form, keeps=keeps)
        layers = make_layers(parallel)
        load_weights(cast(Any, layers), tmp_path)
        parts = [(name, parallel.share(rows)) for name, rows in ROWS.items()]
        weight = torch.cat([meant[name][part.start : part.stop] for name, part in parts])
        bias = torch.cat([meant[f"{name}.bias"][part.start : part.stop] for name, part in parts])
        torch.testing.assert_close(layers.fused(x), x @ weight.T + bias)
        columns = parallel.share(WIDE)
        part = slice(columns.start, columns.stop)
        found = layers.divided.partial(y[:, part])
        torch.testing.assert_close(found, y[:, part] @ meant["down"][:, part].T)


def test_fused_layer_uses_the_largest_input_scale(tmp_path: Path) -> None:
    write(tmp_path, "static")
    layers = make_layers(context(0, 1, "static", keeps=True))
    load_weights(cast(Any, layers), tmp_path)
    weight = cast(Fp8LinearWeight, layers.fused._weight)._weight
    assert weight.values.dtype is torch.float8_e4m3fn
    assert weight.input_scale is not None
    assert weight.input_scale.item() == 0.5 + 5  # q, k and v had 1.5, 3.5 and 5.5


@pytest.mark.parametrize(
    ("rows", "columns", "whole", "is_kept"),
    [
        ((0, 128), (0, 256), 128, True),
        ((0, 192), (0, 256), 192, True),  # the last block of the matrix may be partial
        ((64, 192), (0, 256), 256, False),
        ((0, 192), (0, 256), 256, False),
        ((0, 128), (128, 256), 128, True),
        ((0, 128), (64, 192), 128, False),
        ((0, 120), (0, 256), 120, False),  # no multiple of 16
    ],
)
def test_partial_blocks_are_dequantised(
    rows: tuple[int, int],
    columns: tuple[int, int],
    whole: int,
    is_kept: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parallel = context(0, 1, "blocks", keeps=True)
    assert parallel.quantization is not None
    sources = linear_sources(["a"], [whole], [Span(*rows)])
    made = parallel.quantization.make_linear(parallel, sources, 256, Span(*columns))
    assert (made is not None) == is_kept
    assert ("some fp8 weights are dequantised" in caplog.text) != is_kept


def test_weights_of_an_fp8_config_must_be_fp8(tmp_path: Path) -> None:
    write(tmp_path, "tensor")
    names = {f"{name}.weight": torch.zeros(rows, IN) for name, rows in ROWS.items()}
    biases = {f"{name}.bias": torch.zeros(rows) for name, rows in ROWS.items()}
    path = tmp_path / "model-1.safetensors"
    save_file({**names, **biases, "down.weight": torch.zeros(IN, WIDE)}, path)
    with pytest.raises(CheckpointError, match=r"is torch.float32, the config's .* fp8"):
        load_weights(cast(Any, make_layers(context(0, 1, "tensor", keeps=True))), tmp_path)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "without a scale"),
        (torch.ones(3), "has shape"),
        (torch.ones(2, 2, 2), "has shape"),
        (torch.ones(1, 3), "has shape"),
    ],
    ids=["none", "rows", "three dimensions", "blocks"],
)
def test_scales_of_the_wrong_shape_are_rejected(
    tmp_path: Path, scale: Tensor | None, message: str
) -> None:
    write(tmp_path, "blocks")
    with_names = {} if scale is None else {f"{n}.weight_scale_inv": scale.clone() for n in ROWS}
    rest = {"down.weight_scale_inv": torch.ones(2, 4)}
    save_file({**with_names, **rest}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_weights(cast(Any, make_layers(context(0, 1, "blocks", keeps=False))), tmp_path)


def test_wrong_number_of_row_scales_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, "channel")
    scales = {f"{n}.weight_scale": torch.ones(3) for n in (*ROWS, "down")}
    save_file(scales, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="holds 3 scales"):
        load_weights(cast(Any, make_layers(context(0, 1, "channel", keeps=True))), tmp_path)
