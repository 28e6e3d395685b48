"""A failure to start ranks is reported, and leaks no descriptors. Ranks end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_engine.errors import EngineDead
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.execution.rank_launcher import start_local_ranks
from mooncake_engine.execution.rank_process import PARENT_GONE, RankConnections
from mooncake_hal.command_line import import_path


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


LOADING = """
import sys, time
from multiprocessing.connection import Connection
from mooncake_engine.execution import rank_process

def load(self, start):
    print("loading", flush=True)
    time.sleep(60)

rank_process.RankProcess._load = load
sys.exit(rank_process.serve(*map(Connection, map(int, sys.argv[1:]))))
"""


def test_a_rank_that_loads_the_model_ends_with_its_parent() -> None:
    [ours], [theirs] = RankConnections.pipes(1)
    descriptors = [end.fileno() for end in theirs]
    rank = subprocess.Popen(
        [sys.executable, "-c", LOADING, *map(str, descriptors)],
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": import_path()},
        stdout=subprocess.PIPE,
    )
    with rank:
        for end in theirs:
            end.close()
        start = wire.Start(b"", RankInfo(), None, None, None, None, threads=1)
        ours.orders.send_bytes(wire.encode(start))
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"loading\n"
        for end in ours:
            end.close()
        try:
            assert rank.wait(10.0) == PARENT_GONE
        finally:
            rank.kill()


WITHOUT_CLOSE = """
from pathlib import Path
from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.rank_launcher import LocalLauncher
launcher = LocalLauncher(EngineConfig(Path("model"), tp_size=2))
print(launcher.rendezvous("").removeprefix("file://127.0.0.1"))
"""


def test_files_of_a_process_that_ends_without_close_are_removed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": import_path(), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_CLOSE]
    script = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert Path(script.stdout).parent == tmp_path
    assert not list(tmp_path.iterdir())
