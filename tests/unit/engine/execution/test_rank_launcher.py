"""A failure to start ranks is reported, and leaks no descriptors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.rank_launcher import start_local_ranks


def test_exit_of_the_forking_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineDead, match="starts the ranks exited with status 7; its log says why"):
        start_local_ranks(2)
    assert len(os.listdir("/proc/self/fd")) == before
