"""Small C and C++ helpers, compiled on the machine that runs them.

A helper is a single source text. It is compiled at first use with the system's compiler into a
cache directory and loaded with ctypes, which releases the GIL around every call. Nothing is
compiled at import or install time; on a machine without a compiler, callers get
``NativeUnavailable`` and use a slower path.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mooncake_hal.errors import NativeUnavailable

logger = logging.getLogger(__name__)

DEFAULT_FLAGS = ("-O3", "-march=native")
COMPILE_TIMEOUT_S = 120
_COMPILERS = {"c": ("cc", "gcc", "clang"), "c++": ("c++", "g++", "clang++")}
_SUFFIXES = {"c": ".c", "c++": ".cc"}

_loaded: dict[str, ctypes.CDLL] = {}
_failed: dict[str, str] = {}
_warned: set[str] = set()
_lock = threading.Lock()


def compile_c(
    name: str,
    source: str,
    flags: Sequence[str] = DEFAULT_FLAGS,
    *,
    language: str = "c",
) -> ctypes.CDLL:
    """Compile a source text into a shared library and load it; later calls return the loaded one.

    Args:
        name: the helper's name in file names and messages; letters, digits, ``_``.
        source: the text of one translation unit.
        flags: compiler and linker flags; ``-shared -fPIC`` are added.
        language: ``"c"`` or ``"c++"``.

    Raises:
        NativeUnavailable: there is no compiler, the source does not compile, or no cache directory
            is writable by this user only. Later calls raise the same error without trying again.
    """
    key = _cache_key(source, flags, language)
    with _lock:
        if key in _failed:
            raise NativeUnavailable(name, _failed[key])
        if key not in _loaded:
            try:
                _loaded[key] = _load(name, source, flags, language, key)
            except NativeUnavailable as exc:
                _failed[key] = exc.reason
                raise
        return _loaded[key]


def warn_fallback(name: str, fallback: str, reason: str) -> None:
    """Log once per process, at WARNING, that ``fallback`` is used instead of helper ``name``."""
    with _lock:
        if name in _warned:
            return
        _warned.add(name)
    logger.warning("native helper %r is unavailable, using %s: %s", name, fallback, reason)


def find_compiler(language: str = "c") -> str | None:
    """Return the path of a compiler for ``language``, or None if this machine has none."""
    names = _COMPILERS[language]
    preferred = os.environ.get("CC" if language == "c" else "CXX")
    for candidate in ([preferred] if preferred else []) + list(names):
        if path := shutil.which(candidate):
            return path
    return None


def cache_directory() -> Path:
    """Return the directory of compiled helpers; it is created if needed, and only this user can
    write to it.

    Raises:
        NativeUnavailable: it can be created neither in the user's cache nor in the temporary
            directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    candidates = [
        (Path(base) if base else Path("~/.cache").expanduser()) / "mooncake-hal" / "native",
        Path(tempfile.gettempdir()) / f"mooncake-hal-{os.getuid()}",
    ]
    reasons = []
    for path in candidates:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(path)
        except OSError as exc:
            reasons.append(f"{path}: {exc.strerror}")
        else:
            return path
    raise NativeUnavailable("cache", f"no directory for compiled helpers ({'; '.join(reasons)})")


def _require_private(path: Path) -> None:
    """Raise PermissionError for a directory in which another user could place a library for this
    process to load."""
    info = path.stat()
    if info.st_uid != os.getuid():
        raise PermissionError(1, "belongs to another user")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise PermissionError(1, "others may write to it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(1, "not writable")


@lru_cache(maxsize=1)
def _cpu_identity() -> str:
    """Describe the processor by the properties on which ``-march=native`` depends."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = sorted({line for line in text.splitlines() if line.startswith(wanted)})
    return "\n".join([platform.machine(), *lines])


def _cache_key(source: str, flags: Sequence[str], language: str) -> str:
    compiler = find_compiler(language)
    version = ""
    if compiler:
        real = Path(compiler).resolve()
        version = f"{real}:{real.stat().st_mtime_ns}"
    parts = (source, *flags, language, version, _cpu_identity())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _load(name: str, source: str, flags: Sequence[str], language: str, key: str) -> ctypes.CDLL:
    library = cache_directory() / f"{name}-{key}.so"
    if not library.exists():
        _compile(name, source, flags, language, library)
    try:
        return ctypes.CDLL(str(library), use_errno=True)
    except OSError as exc:
        raise NativeUnavailable(name, f"{library} can't be loaded: {exc}") from exc


def _compile(name: str, source: str, flags: Sequence[str], language: str, library: Path) -> None:
    """Compile in the target's directory and rename, so that no process ever loads a partly written
    library."""
    compiler = find_compiler(language)
    if compiler is None:
        wanted = "/".join(_COMPILERS[language])
        raise NativeUnavailable(name, f"no {language} compiler on PATH (looked for {wanted})")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{name}-") as folder:
        text = Path(folder) / f"{name}{_SUFFIXES[language]}"
        text.write_text(source)
        built = Path(folder) / "built.so"
        command = [compiler, str(text), "-shared", "-fPIC", "-o", str(built), *flags]
        # logged because it may take 30 s
        logger.info("compiling %s once; the library is cached in %s", name, library.parent)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise NativeUnavailable(name, f"{compiler} could not be run: {exc}") from exc
        if done.returncode != 0:
            detail = done.stderr.strip()[:2000]
            raise NativeUnavailable(name, f"{compiler} failed ({done.returncode}): {detail}")
        built.replace(library)
