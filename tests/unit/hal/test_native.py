"""Compiled helpers: caching, rejected caches, errors and log lines."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable

ADD = "long add(long a, long b) { return a + b + %d; }\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler on this machine")
def test_helper_is_compiled_once_logged_and_callable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = ADD % os.getpid()
    with caplog.at_level(logging.INFO):
        library = native.compile_c("adder", source)
        native.compile_c("adder", source)
    folder = tmp_path / "mooncake-hal" / "native"
    assert caplog.messages == [f"compiling adder once; the library is cached in {folder}"]
    assert library.add(2, 3) == 5 + os.getpid()
    assert native.compile_c("adder", source) is library
    built = list((tmp_path / "mooncake-hal" / "native").iterdir())
    assert [path.suffix for path in built] == [".so"]


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeUnavailable, match="no c compiler on PATH"):
        native.compile_c("lonely", ADD % -1)


@pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler on this machine")
def test_compile_error_is_reported() -> None:
    with pytest.raises(NativeUnavailable, match="error"):
        native.compile_c("broken", "int f( {")
    with pytest.raises(NativeUnavailable, match="error"):
        native.compile_c("broken", "int f( {")


def test_cache_writable_by_others_is_not_used(tmp_path: Path) -> None:
    ours = tmp_path / "mooncake-hal" / "native"
    ours.mkdir(parents=True)
    ours.chmod(0o777)
    assert native.cache_directory() != ours


def test_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        native.warn_fallback("once", "python", "no compiler")
        native.warn_fallback("once", "python", "no compiler")
    assert [record.getMessage() for record in caplog.records] == [
        "native helper 'once' is unavailable, using python: no compiler"
    ]
