"""Compiles the C++ kernels and binds them with ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

from mooncake_hal.native import compile_c

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-Wno-psabi",  # vectors stay inside one translation unit
)
_FILES = (
    "simd.h",
    "paging.h",
    "weighing.h",
    "parts.h",
    "decode.cpp",
    "latent.cpp",
    "prefill.cpp",
    "linear.cpp",
    "elementwise.cpp",
)
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "decode_attention": (*(c_void_p,) * 8, c_float, c_int, c_int),
    "mla_decode_attention": (*(c_void_p,) * 8, c_float, c_int, c_int),
    "prefill_attention": (*(c_void_p,) * 9, c_float, c_int, c_int),
    "linear": (*(c_void_p,) * 5, c_int),
    "rms_norm": (*(c_void_p,) * 3, *(c_int64,) * 5, c_float, c_int, c_int),
    "add_rms_norm": (*(c_void_p,) * 3, *(c_int64,) * 2, c_float, c_int, c_int),
    "rope": (*(c_void_p,) * 5, c_int, c_int),
    "silu_mul": (*(c_void_p,) * 2, *(c_int64,) * 3, c_int, c_int),
    "write_kv": (*(c_void_p,) * 6, c_int),
}


def load_kernels(flags: Sequence[str] = FLAGS, before: str = "") -> ctypes.CDLL:
    """Compile the kernels, unless they are cached, and declare their signatures.

    Args:
        flags: compiler flags, such as another ``-march``.
        before: source to prepend, such as emulations of instructions.

    Raises:
        NativeUnavailable: see ``mooncake_hal.native.compile_c``.
    """
    folder = Path(__file__).parent
    source = "\n".join([before, *((folder / name).read_text() for name in _FILES)])
    library = compile_c("mooncake_hal_cpu", source, flags, language="c++")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    return library
