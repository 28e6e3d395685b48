"""Stub libraries in place of CANN, with which the real torch-npu and mooncake's engine load.

Their unresolved symbols are read from the packages themselves. The functions in ``runtime.c`` and
``hixl.cpp`` work over host memory; all others return 0.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = "libascendcl.so"
HIXL = "libllm_datadist.so"
_SYSTEM = re.compile(
    r"(ld-linux.*|lib(c|m|dl|rt|gcc_s|stdc\+\+|pthread|util|numa|curl|ibverbs|z|lzma))\.so"
)
_PYTHON = re.compile(r"_?Py")


def build(packages: Sequence[Path], providers: Sequence[Path], folder: Path) -> list[Path]:
    """Compile the libraries.

    Args:
        packages: folders whose libraries need CANN.
        providers: libraries that define some of the packages' symbols, such as torch's.
        folder: output folder.

    Returns: the libraries, in the order to load them in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needy = [path for package in packages for path in package.rglob("*.so*")]
    needed = {name for path in needy for name in _needed(path)}
    present = {path.name for path in needy} | {path.name for path in providers}
    names = sorted(name for name in needed - present if not _SYSTEM.match(name))
    defined = {symbol for path in [*needy, *providers] for symbol in _symbols(path, defined=True)}
    missing = {symbol for path in needy for symbol in _symbols(path, defined=False)} - defined
    ours = _compile(folder, RUNTIME, HERE / "runtime.c"), _compile(folder, HIXL, HERE / "hixl.cpp")
    provided = {symbol for path in ours for symbol in _symbols(path, defined=True)}
    empty = folder / "empty.c"
    empty.write_text(
        "".join(
            _returns_zero(number, symbol)
            for number, symbol in enumerate(sorted(missing - provided))
        )
    )
    # torch-npu looks a symbol up in one library or another, and in that library's dependencies
    rest = [_compile(folder, name, empty, *ours) for name in names if name not in (RUNTIME, HIXL)]
    return [*ours, *rest]


def built(packages: Sequence[Path], providers: Sequence[Path], folder: Path) -> list[Path]:
    """Return the libraries, compiled once per version of this folder's files; see ``build``."""
    texts = [path.read_bytes() for path in sorted(HERE.glob("*.*"))]
    wanted = folder / hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (wanted / "order").exists():
            libraries = build(packages, providers, wanted)
            (wanted / "order").write_text("\n".join(path.name for path in libraries))
    return [wanted / name for name in (wanted / "order").read_text().split()]


def preload(libraries: Iterable[Path]) -> None:
    """Load the libraries for good; packages imported afterwards find their names and symbols."""
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _compile(folder: Path, name: str, source: Path, *needs: Path) -> Path:
    target = folder / name
    compiler = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc"]
    flags = ["-O1", "-w", "-fPIC", "-shared", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
    links = [f"-Wl,-soname,{name}", *map(str, needs)]
    command = [*compiler, *flags, str(source), *links, "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    return target


def _returns_zero(number: int, symbol: str) -> str:
    name = f"stub_{number}"
    return f'void *{name}(void) __asm__("{symbol}");\nvoid *{name}(void) {{ return 0; }}\n'


def _needed(library: Path) -> set[str]:
    return set(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", str(library))))


def _symbols(library: Path, *, defined: bool) -> set[str]:
    flag = "--defined-only" if defined else "--undefined-only"
    found = set()
    for line in _run("nm", "-D", flag, str(library)).splitlines():
        kind, symbol = line.split()[-2:]
        versioned = "@" in symbol and not defined
        if kind not in "wv" and not versioned and not _PYTHON.match(symbol):
            found.add(symbol.split("@")[0])
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
