"""A command line is read, and its help shown, before anything heavy is brought in."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "transformers", "zmq", "uvicorn"}


@pytest.mark.parametrize("command", ["serve", "up", "bench", "generate"])
def test_help_brings_in_nothing_heavy(command: str) -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "mooncake_engine.cli", command, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50, check=True)
    names = (line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines())
    found = {name.partition(".")[0] for name in names}
    assert "mooncake_engine" in found
    assert found.isdisjoint(HEAVY), found & HEAVY
