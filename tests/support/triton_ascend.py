"""Triton kernels compiled as for Ascend: lowered by triton-ascend, checked against its documented
limits, and run on the CPU through MLIR.

Without CANN, triton-ascend stops at linalg on tensors, the input of CANN's compiler. It checks no
limits before that, so they are checked on the linalg.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import (
    AscendBackend,
    _parse_linalg_metadata,
    make_ttir,
    ttir_to_linalg,
)
from triton.backends.compiler import AttrsDescriptor, GPUTarget
from triton.compiler.compiler import ASTSource

UNIFIED_BUFFER_BYTES = 96 << 10
"""Half of the vector core's buffer: the other half is filled meanwhile."""
MAX_GRID = 65535
ROW_BYTES = 32
"""Bytes that the vector unit processes at once; rows of other sizes are padded, or processed
element by element."""

SHIM = Path(__file__).with_name("memref_copy.c")
TIMEOUT_S = 120
_WIDTHS = {
    "f64": 8,
    "i64": 8,
    "index": 8,
    "f32": 4,
    "i32": 4,
    "f16": 2,
    "bf16": 2,
    "i16": 2,
    "i8": 1,
    "i1": 1,
}
_LOCAL = re.compile(r"(?:tensor|memref)<((?:\d+x)+)(\w+)>")
_FORBIDDEN = {
    r"\bf64\b": "float64, which the vector cores do not have",
    r"\bf8E\w+": "float8, which triton-ascend 3.2 does not lower",
    r"inttoptr|int_to_ptr": "addresses made from integers",
    r"tt\.atomic\w+ .*i64": "atomics on int64",
}
_PASSES = (
    "convert-elementwise-to-linalg",
    "linalg-fuse-elementwise-ops",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize=allow-return-allocs-from-loops=true",
    "buffer-deallocation-pipeline",
    "lower-affine",
    "convert-linalg-to-loops",
    "expand-strided-metadata",
    "lower-affine",
    "memref-expand",
    "convert-bufferization-to-memref",
    "canonicalize",
    "cse",
    "convert-scf-to-cf",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "arith-expand=include-bf16=true",
    "convert-arith-to-llvm",
    "convert-complex-to-llvm",
    "finalize-memref-to-llvm",
    "convert-func-to-llvm",
    "convert-cf-to-llvm",
    "convert-index-to-llvm",
    "convert-ub-to-llvm",
    "reconcile-unrealized-casts",
)


def lower(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """Return a kernel's linalg.

    Args:
        kernel: under ``triton.jit``.
        types: of its arguments, as Triton names them (``"*bf16"``); by default ``i32``.
        constants: the compile-time arguments.

    Raises:
        subprocess.CalledProcessError, triton.CompilationError: it does not lower.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names if name not in constants}
    aligned = {at: 16 for at, name in enumerate(names) if signature.get(name, "")[:1] == "*"}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constants=dict(constants),
        attrs=AttrsDescriptor.from_hints(aligned),
    )
    target = GPUTarget("npu", "Ascend910B3", 0)
    backend = AscendBackend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"hash": "", "target": target, **options.__dict__}
    codegen = backend.get_codegen_implementation()
    module = source.make_ir(options, codegen, backend.get_module_map(), context)
    linalg = ttir_to_linalg(make_ttir(module, metadata, options), metadata, options, named_ops=True)
    return str(_parse_linalg_metadata(linalg, metadata)[0])


def violations(linalg: str, grid: Sequence[int]) -> list[str]:
    """Return the documented limits that a lowered kernel violates, one sentence each."""
    found = [f"uses {what}" for pattern, what in _FORBIDDEN.items() if re.search(pattern, linalg)]
    programs = 1
    for size in grid:
        programs *= size
    if programs > MAX_GRID:
        found.append(f"has {programs} programs, Ascend starts {MAX_GRID} at most")
    peak = live_bytes(linalg)
    if peak > UNIFIED_BUFFER_BYTES:
        found.append(f"holds {peak} bytes at once, the unified buffer {UNIFIED_BUFFER_BYTES}")
    odd = sorted({text for text in _LOCAL.findall(linalg) if _row_bytes(*text) % ROW_BYTES})
    found += [f"has rows of {_row_bytes(*text)} bytes, not of {ROW_BYTES}" for text in odd]
    return found


def _row_bytes(shape: str, kind: str) -> int:
    """Bytes of a tensor's innermost row; none for single elements, which live in registers."""
    sizes = [int(size) for size in shape.split("x") if size]
    return sizes[-1] * _WIDTHS.get(kind, 4) if sizes[-1] > 1 and kind != "i1" else 0


def live_bytes(linalg: str) -> int:
    """Estimate the peak of local memory from the last uses of values."""
    lines = [line.strip() for line in linalg.splitlines()]
    made: dict[str, tuple[int, int]] = {}
    last: dict[str, int] = {}
    same: dict[str, str] = {}
    for at, line in enumerate(lines):
        name, _, rest = line.partition(" = ") if re.match(r"%[\w#:]+ = ", line) else ("", "", line)
        for used in re.findall(r"%\w+", rest):
            last[same.get(used, used)] = at
        if name:
            _take_in(name.split(":")[0], rest, at, made, same)
    ends = {name: last.get(name, begin) for name, (begin, _) in made.items()}
    return max(
        (
            sum(size for name, (begin, size) in made.items() if begin <= at <= ends[name])
            for at in range(len(lines))
        ),
        default=0,
    )


_VIEWS = ("bufferization.to_tensor", "tensor.expand", "tensor.collapse", "tensor.extract_slice")
_FREE = ("tensor.extract ", "tensor.empty", "tensor.insert", "arith.constant", "memref.")


def _take_in(
    name: str, rest: str, at: int, made: dict[str, tuple[int, int]], same: dict[str, str]
) -> None:
    source = re.search(r"%\w+", rest)
    if rest.startswith("memref.alloc"):
        made[name] = (at, _nbytes(rest.rsplit(" : ", 1)[1]))
    elif rest.startswith((*_VIEWS, "memref.")) and source:
        same[name] = same.get(source[0], source[0])
    elif not rest.startswith(_FREE):
        result = re.search(r"(?:->|to|:)\s*(tensor<[^>]*>)\s*$", rest)
        if result and (size := _nbytes(result[1])):
            made[name] = (at, size)


def _nbytes(kind: str) -> int:
    found = _LOCAL.match(kind)
    if found is None:
        return 0
    nbytes = _WIDTHS.get(found[2], 4)
    for size in filter(None, found[1].split("x")):
        nbytes *= int(size)
    return nbytes


@dataclass(frozen=True)
class Tools:
    """MLIR's programs.

    Args:
        root: an unpacked Debian package's ``usr``.
    """

    root: Path

    def run(self, name: str, *arguments: str) -> None:
        """Run one; raises RuntimeError with what it said."""
        lib = self.root / "lib"
        paths = f"{lib / 'x86_64-linux-gnu'}:{lib / 'llvm-22/lib'}"
        command = [str(lib / "llvm-22/bin" / name), *arguments]
        environment = {**os.environ, "LD_LIBRARY_PATH": paths}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[:1500]}")


class CompiledKernel:
    """A lowered kernel as a callable on the CPU.

    Args:
        linalg: from ``lower``.
        tools: compile it.
    """

    def __init__(self, linalg: str, tools: Tools) -> None:
        found = re.search(r"func\.func @(\w+)\((.*?)\) attributes", linalg, re.DOTALL)
        assert found is not None, "the linalg has no kernel"
        types = re.findall(r"%arg\d+: (memref<[^>]*>|[if]\d+)", found[2])
        self._types = types[2:-6]  # without triton-ascend's own: two pointers first, the grid last
        self._function = getattr(ctypes.CDLL(str(_built(linalg, tools))), found[1])
        self._function.restype = None

    def __call__(self, grid: Sequence[int], *arguments: Tensor | float) -> None:
        """Run every program of a grid, one after another."""
        assert len(arguments) == len(self._types), (arguments, self._types)
        sizes = [*grid, 1, 1][:3]
        values: list[Any] = [_memref(None), _memref(None)]
        values += [
            _argument(kind, value) for kind, value in zip(self._types, arguments, strict=True)
        ]
        flat = [part for value in values for part in value]
        for z in range(sizes[2]):
            for y in range(sizes[1]):
                for x in range(sizes[0]):
                    self._function(*flat, *map(ctypes.c_int32, (*sizes, x, y, z)))


def _memref(tensor: Tensor | None) -> list[Any]:
    address = ctypes.c_void_p(tensor.data_ptr() if tensor is not None else 0)
    elements = tensor.untyped_storage().nbytes() if tensor is not None else 0
    return [address, address, *map(ctypes.c_int64, (0, elements, 1))]


def _argument(kind: str, value: Tensor | float) -> list[Any]:
    if isinstance(value, Tensor):
        return _memref(value)
    if kind.startswith("f"):
        return [ctypes.c_float(value)]
    return [{"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind](int(value))]


def _built(linalg: str, tools: Tools) -> Path:
    """Compile linalg to a shared library."""
    folder = Path(mkdtemp(prefix="mooncake-test-mlir-"))
    (folder / "kernel.mlir").write_text(_as_mlir_22(linalg))
    at = {
        name: str(folder / name) for name in ("kernel.mlir", "llvm.mlir", "kernel.ll", "kernel.o")
    }
    passes = [f"--{name}" for name in _PASSES]
    known = "--allow-unregistered-dialect"
    tools.run("mlir-opt", at["kernel.mlir"], known, *passes, "-o", at["llvm.mlir"])
    tools.run("mlir-translate", "--mlir-to-llvmir", at["llvm.mlir"], "-o", at["kernel.ll"])
    flags = ("-O2", "-relocation-model=pic", "-filetype=obj")
    tools.run("llc", *flags, at["kernel.ll"], "-o", at["kernel.o"])
    library = folder / "kernel.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", at["kernel.o"], str(SHIM), "-lm", "-o"]
    subprocess.run([*command, str(library)], check=True, timeout=TIMEOUT_S)
    return library


def _as_mlir_22(linalg: str) -> str:
    """Add the type of its result to each ``to_tensor``, which triton-ascend's older MLIR omits."""

    def named(found: re.Match[str]) -> str:
        shape = found[3].split(", strided")[0]
        return (
            f"bufferization.to_tensor {found[1]} restrict writable : {found[2]} to tensor<{shape}>"
        )

    pattern = r"bufferization\.to_tensor (%\S+) restrict writable : (memref<([^>]*)>)"
    return re.sub(pattern, named, linalg)
