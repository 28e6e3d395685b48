"""Reads ``quantization_config`` of config.json: the fp8 of DeepSeek, Qwen, llm-compressor and
ModelOpt."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_engine.errors import CheckpointError
from mooncake_hal.fp8_linear import FP8_BLOCK

SCALE_SUFFIXES = (".weight_scale", ".weight_scale_inv", ".input_scale")
"""Suffixes of the names of tensors that belong to a quantised weight."""
_SUPPORTED = (
    "fp8 (e4m3) with scales of tensors, rows, or blocks of 128 by 128: quant_method 'fp8', "
    "'compressed-tensors' of format 'float-quantized', or 'modelopt' of quant_algo 'FP8'"
)


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """The quantisation of a model whose linear layers have fp8 (e4m3) weights.

    Args:
        is_blockwise: whether scales are of blocks of 128 by 128; else of rows, or of the tensor.
        scale_name: suffix of the name of a linear's scales.
        has_input_scales: whether each linear also has a scale for its input (static).
        ignored: linears that are not quantised: names, parts of a path, or ``re:`` and a regular
            expression.
        is_made_on_load: whether the checkpoint is unquantised, and so has no scales, and weights
            are quantised while they are loaded.
    """

    is_blockwise: bool
    scale_name: str
    has_input_scales: bool
    ignored: tuple[str, ...]
    is_made_on_load: bool = False

    def is_ignored(self, name: str) -> bool:
        """Whether the linear with this name in the checkpoint is not quantised."""
        return any(_matches(entry, name) for entry in self.ignored)

    def is_scale(self, name: str) -> bool:
        """Whether the tensor with this name in the checkpoint is a scale of a quantised weight."""
        return not self.is_made_on_load and name.endswith(SCALE_SUFFIXES)


FP8_ON_LOAD = Fp8Config(
    is_blockwise=False, scale_name="", has_input_scales=False, ignored=(), is_made_on_load=True
)
"""``--quantization fp8`` for an unquantised checkpoint, with scales of rows. Embeddings, the head,
norms and routers are no linear layers here, and stay unquantised."""


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return f".{entry}." in f".{name}."


def read_quantization(fields: object, source: str) -> Fp8Config | None:
    """Parse ``quantization_config``; None for unquantised weights.

    Args:
        fields: value of the field.
        source: name of the file, for error messages.

    Raises:
        CheckpointError: the quantisation is not supported; the message says which ones are.
    """
    if fields is None:
        return None
    if isinstance(fields, Mapping):
        method = fields.get("quant_method")
        read = _READERS.get(str(method))
        try:
            if read is not None and (found := read(fields)) is not None:
                return found
        except (AttributeError, KeyError, TypeError, ValueError, re.error):
            pass  # malformed: rejected below, like any unsupported one
    raise CheckpointError(
        f"{source}: quantization_config {fields!r} is not supported; supported: {_SUPPORTED}"
    )


def _read_fp8(fields: Mapping[str, Any]) -> Fp8Config | None:
    """Read ``quant_method: fp8``, with or without ``weight_block_size``."""
    blocks, scheme = fields.get("weight_block_size"), fields.get("activation_scheme", "dynamic")
    is_known = blocks in (None, [FP8_BLOCK, FP8_BLOCK]) and scheme in ("dynamic", "static")
    is_static = scheme == "static"
    if not is_known or fields.get("fmt", "e4m3") != "e4m3" or (blocks and is_static):
        return None
    ignored = [*(fields.get("modules_to_not_convert") or ()), *(fields.get("ignored_layers") or ())]
    name = "weight_scale_inv" if blocks else "weight_scale"
    return Fp8Config(bool(blocks), name, is_static, _names(ignored))


def _read_compressed(fields: Mapping[str, Any]) -> Fp8Config | None:
    """Read ``compressed-tensors`` with one group, of all linears except ignored ones."""
    (group,) = fields["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    strategy, targets = weights["strategy"], group["targets"]
    kinds = {(each["num_bits"], each["type"], each["symmetric"]) for each in (weights, inputs)}
    # the two formats differ in nothing that is stored for fp8
    is_known = fields.get("format") in ("float-quantized", "naive-quantized")
    is_known = is_known and kinds == {(8, "float", True)}
    is_known = is_known and not fields.get("transform_config")  # rotates inputs (Hadamard)
    is_block, is_static = strategy == "block", not inputs["dynamic"]
    if not is_known or targets != ["Linear"] or strategy not in ("tensor", "channel", "block"):
        return None
    if is_block and (is_static or weights["block_structure"] != [FP8_BLOCK, FP8_BLOCK]):
        return None
    return Fp8Config(is_block, "weight_scale", is_static, _names(fields.get("ignore") or ()))


def _read_modelopt(fields: Mapping[str, Any]) -> Fp8Config | None:
    """Read ``quant_method: modelopt``, whose ignored linears are wildcards."""
    if str(fields["quant_algo"]).upper() != "FP8":
        return None
    entries = fields.get("ignore") or fields.get("exclude_modules") or ()
    patterns = (f"re:{fnmatch.translate(entry)}" if "*" in entry else entry for entry in entries)
    return Fp8Config(False, "weight_scale", True, _names(patterns))


_READERS = {"fp8": _read_fp8, "compressed-tensors": _read_compressed, "modelopt": _read_modelopt}


def _names(entries: Any) -> tuple[str, ...]:
    names = tuple(str(entry) for entry in entries)
    for name in names:
        if name.startswith("re:"):
            re.compile(name.removeprefix("re:"))
    return names
