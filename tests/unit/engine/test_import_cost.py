"""A command line is read, and its help shown, before anything heavy is brought in."""

from __future__ import annotations

import pytest
from support.programs import imported_by

HEAVY = {"torch", "numpy", "transformers", "zmq", "uvicorn"}


@pytest.mark.parametrize("command", ["serve", "up", "bench", "generate"])
def test_help_brings_in_nothing_heavy(command: str) -> None:
    modules = imported_by("-m", "mooncake_engine.cli", command, "--help")
    found = {name.partition(".")[0] for name in modules}
    assert "mooncake_engine" in found
    assert found.isdisjoint(HEAVY), found & HEAVY
