"""Children of ``up`` that are slow to exit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from mooncake_engine.process.child_processes import ChildDied, ChildProcesses
from mooncake_engine.process.local_deployment import _stop_on_signal

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


LONG_LINE = """
import sys
sys.stderr.write("\\rloading" * 400_000)  # a progress bar writes no line ends
sys.stderr.write("\\n")
print("http://127.0.0.1:1", flush=True)
sys.stdin.readline()
sys.stderr.write("Error: the last line\\n")
sys.exit(3)
"""


def test_line_above_the_limit_is_cut_and_the_child_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with ChildProcesses(tmp_path) as children:
            child = await children.start("bar", [sys.executable, "-c", LONG_LINE])
            assert await child.ready == "http://127.0.0.1:1"
            with pytest.raises(ChildDied, match="exited with status 3: Error: the last line"):
                await children.guard(asyncio.sleep(60))
        relayed = (tmp_path / "bar.log").read_bytes()
        assert b"a line of more than 1048576 bytes was dropped" in relayed
        assert len(relayed) < 10_000

    asyncio.run(main())


LONG_OUTPUT = """
import sys
print("http://127.0.0.1:1", flush=True)
sys.stderr.write("a line of its log\\n" * 100_000)  # more than a pipe holds
sys.stderr.write("Error: the last line\\n")
sys.exit(3)
"""


def test_full_disk_does_not_block_a_child_or_hide_its_end(tmp_path: Path) -> None:
    (tmp_path / "full.log").symlink_to("/dev/full")

    async def main() -> None:
        async with ChildProcesses(tmp_path) as children:
            child = await children.start("full", [sys.executable, "-c", LONG_OUTPUT])
            assert await child.ready == "http://127.0.0.1:1"
            with pytest.raises(ChildDied, match="exited with status 3: Error: the last line"):
                await children.guard(asyncio.sleep(20))

    asyncio.run(main())


DYING = """
print("http://127.0.0.1:1", flush=True)
raise SystemExit("Error: out of memory")
"""


def test_signal_after_a_death_hurries_the_others_and_keeps_the_reason(tmp_path: Path) -> None:
    """The shutdown timeout is an hour."""

    async def interrupt() -> None:
        while "asked 1" not in (tmp_path / "slow.log").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    async def until_stopped(children: ChildProcesses) -> None:
        async with children:
            await children.guard(asyncio.sleep(60))

    async def main() -> int | None:
        children = ChildProcesses(tmp_path, stop_timeout_s=3600)
        _stop_on_signal(children)
        slow = await children.start("slow", [sys.executable, "-c", SLOW_TO_END])
        await slow.ready
        interrupting = asyncio.ensure_future(interrupt())
        await children.start("dying", [sys.executable, "-c", DYING])
        with pytest.raises(ChildDied, match="out of memory"):
            await until_stopped(children)
        await interrupting
        return slow.process.returncode

    assert asyncio.run(main()) == 7
