"""Children of ``up`` that are slow to exit."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mooncake_engine.process.child_processes import ChildProcesses

SLOW_TO_END = """
import signal, sys, time
asked = []
def stop(*_):
    asked.append(1)
    print("asked", len(asked), flush=True)
    if len(asked) > 1:
        sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("http://127.0.0.1:1", flush=True)
while True:
    time.sleep(0.05)
"""


def test_forced_stop_sends_a_second_sigterm(tmp_path: Path) -> None:
    """The shutdown timeout is an hour."""

    async def main() -> int | None:
        children = ChildProcesses(tmp_path, stop_timeout_s=3600)
        child = await children.start("slow", [sys.executable, "-c", SLOW_TO_END])
        await child.ready
        leaving = asyncio.ensure_future(children.__aexit__(None, None, None))
        while "asked 1" not in (tmp_path / "slow.log").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert not leaving.done()
        children.force_stop()
        await leaving
        return child.process.returncode

    assert asyncio.run(main()) == 7


def test_shutdown_timeout_kills_child(tmp_path: Path) -> None:
    async def main() -> int | None:
        children = ChildProcesses(tmp_path, stop_timeout_s=0.1)
        child = await children.start("slow", [sys.executable, "-c", SLOW_TO_END])
        await child.ready
        await children.__aexit__(None, None, None)
        return child.process.returncode

    assert asyncio.run(main()) in (7, -9)
