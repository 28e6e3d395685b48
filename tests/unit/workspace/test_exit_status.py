"""How the end of a process is told, by the engine and by the proxy, which share no code."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from mooncake_engine.exit_status import describe_exit as by_engine
from mooncake_proxy.exit_status import describe_exit as by_proxy


@pytest.mark.parametrize("describe", [by_engine, by_proxy])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL, as the kernel does when memory runs out: see dmesg"),
        (-(signal.SIGRTMIN + 1), f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_end_is_told_in_words(describe: Callable[[int], str], status: int, said: str) -> None:
    assert describe(status) == said
