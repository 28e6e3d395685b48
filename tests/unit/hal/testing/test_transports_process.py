"""What the transport suite counts as left behind: only what its own processes made."""

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


def test_a_file_that_nothing_uses_any_more_was_left(path: Path) -> None:
    before = leftovers()
    path.write_bytes(b"left")
    assert leftovers(before.shared_memory).shared_memory == before.shared_memory | {path.name}


def test_a_file_that_another_program_works_with_is_its_own(path: Path) -> None:
    before = leftovers().shared_memory
    command = [sys.executable, "-c", HOLD, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "made\n"
        assert path.name in leftovers().shared_memory
        assert leftovers(before).shared_memory == before


def test_a_file_that_another_program_removes_is_not_missed(path: Path) -> None:
    path.write_bytes(b"")
    before = leftovers().shared_memory
    path.unlink()
    assert leftovers(before).shared_memory == before
