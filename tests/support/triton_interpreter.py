"""Fixes for Triton's interpreter, which keeps bfloat16 as bit patterns and computes with those.

In 3.7.1, ``tl.dot`` of bfloat16 silently multiplies the patterns as integers. Values are not
rounded to e4m3 as a device rounds them, and e4m3's NaN is no NaN after widening. Import this in a
process that runs with TRITON_INTERPRET=1, before any kernel runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_ARITHMETIC = ("add", "sub", "mul", "div")
_EXTREMES = ("maximumf", "minimumf", "maxnumf", "minnumf")
_COMPARISONS = ("OLT", "OGT", "OLE", "OGE", "OEQ", "UNE")
_BINARY = (
    *(f"create_f{name}" for name in _ARITHMETIC),
    *(f"create_{name}" for name in _EXTREMES),
    *(f"create_fcmp{name}" for name in _COMPARISONS),
)


def repair() -> None:
    """Fix bfloat16, and launches from several threads; idempotent."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("run with TRITON_INTERPRET=1, or kernels are compiled for a device")
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "is_repaired"):
        return
    builder.is_repaired = True
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(
            self.get_fp32(value), tl.bfloat16
        )
    interpreter.GridExecutor.__call__ = _one_at_a_time(interpreter.GridExecutor.__call__)
    interpreter._convert_float = _converted(interpreter._convert_float)
    builder.create_dot = _dot_of_values(builder.create_dot)
    # a kernel ends before the next one starts
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None
    for name in _BINARY:
        setattr(builder, name, _rounded(getattr(builder, name)))


def _converted(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions from and to e4m3, by torch."""
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16}
    kinds |= {tl.float16: torch.float16, tl.float32: torch.float32}

    def call(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(values, source, target, rounding)
        raw = np.ascontiguousarray(values).view(f"u{source.primitive_bitwidth // 8}")
        found = torch.from_numpy(raw).view(kinds[source]).to(kinds[target])
        width = getattr(torch, f"uint{target.primitive_bitwidth}")
        return found.view(width).numpy()

    return call


def _one_at_a_time(launch: Callable[..., None]) -> Callable[..., None]:
    """Serialise launches: the interpreter keeps its position in the grid in a global."""
    lock = threading.Lock()

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            launch(self, *args, **kwargs)

    return call


def _is_bfloat16(handle: Any) -> bool:
    return getattr(handle.dtype, "scalar", None) == tl.bfloat16


def _widened(handle: Any) -> Any:
    if not _is_bfloat16(handle):
        return handle
    values = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def _dot_of_values(dot: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return dot(self, _widened(left), _widened(right), *rest)

    return create_dot


def _rounded(operation: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        if not (_is_bfloat16(left) and _is_bfloat16(right)):
            return operation(self, left, right, *rest)
        result = operation(self, _widened(left), _widened(right), *rest)
        wide = result.data.dtype == np.float32
        return self.create_fp_trunc(result, tl.bfloat16) if wide else result

    return apply
