"""Leak detection of the transport suite: only files of its own processes count as leftovers."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_hal.testing.transports_process import leftovers

HOLD = "import sys; held = open(sys.argv[1], 'w'); print('made', flush=True); sys.stdin.read()"


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path("/dev/shm") / f"mooncake-hal-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_unused_new_file_is_a_leftover(path: Path) -> None:
    before = leftovers()
    path.write_bytes(b"left")
    assert leftovers(before.shared_memory).shared_memory == before.shared_memory | {path.name}


def test_file_in_use_by_another_program_is_no_leftover(path: Path) -> None:
    before = leftovers().shared_memory
    command = [sys.executable, "-c", HOLD, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "made\n"
        assert path.name in leftovers().shared_memory
        assert leftovers(before).shared_memory == before


def test_file_removed_by_another_program_is_ignored(path: Path) -> None:
    path.write_bytes(b"")
    before = leftovers().shared_memory
    path.unlink()
    assert leftovers(before).shared_memory == before
