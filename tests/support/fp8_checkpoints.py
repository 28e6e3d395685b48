"""fp8 checkpoints in their published formats, made of small ones, and their dequantised twins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 128
WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
"""Config of a model whose linear layers consist of whole blocks."""
_PER_TENSOR = {"quant_method": "fp8", "ignored_layers": ["lm_head"]}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": ["lm_head"],
    },
    "static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "channel": _COMPRESSED,
}
"""``quantization_config`` by kind of scales."""


def quantise(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3, and its scales in the checkpoint's format."""
    if form == "blocks":
        rows, columns = weight.shape
        scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
        values = torch.empty(weight.shape, dtype=E4M3)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                scales[i, j] = weight[part].abs().max() / 448
                values[part] = (weight[part] / scales[i, j]).to(E4M3)
        return values, scales
    if form == "channel":
        scales = weight.abs().amax(1, keepdim=True) / 448
    else:
        scales = weight.abs().max() / 448
    return (weight / scales).clamp(-448, 448).to(E4M3), scales


def dequantise(values: Tensor, scales: Tensor, form: str) -> Tensor:
    """The dequantised matrix in float32."""
    if form == "blocks":
        scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        scales = scales[: values.shape[0], : values.shape[1]]
    return values.float() * scales


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is quantised: linear layers, except for the head and the experts' router."""
    is_linear = tensor.dim() == 2 and name.endswith(".weight")
    return is_linear and not any(part in name for part in ("embed", "lm_head", ".gate.weight"))


def write_fp8(source: Path, target: Path, form: str) -> tuple[Path, Path]:
    """Write a checkpoint in fp8, and the same values unquantised; returns both directories."""
    twin = target.with_name(f"{target.name}-dequantised")
    for directory in (target, twin):
        shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    quantised, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if is_quantised(name, tensor):
            values, scales = quantise(tensor.float(), form)
            end = "_scale_inv" if form == "blocks" else "_scale"
            quantised |= {name: values, name + end: scales.contiguous()}
            plain[name] = dequantise(values, scales, form).to(tensor.dtype)
            if form == "static":
                quantised[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
    save_file(quantised, target / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    edit_config(target, lambda config: config.update(quantization_config=FORMS[form]))
    return target, twin


def even_halves(directory: Path) -> Path:
    """Copy each row's largest element into both halves of its columns, so that the whole matrix and
    two ranks with half of the columns each quantise it with the same scales."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if is_quantised(name, tensor):
            tensor[:, 0] = tensor[:, tensor.shape[1] // 2] = tensor.abs().amax(1)
    save_file(tensors, path, {"format": "pt"})
    return directory


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
