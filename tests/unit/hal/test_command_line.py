"""What our commands share: how a process ended, and what a tool that is not installed says.

The proxy shares no code with the others, and describes the end of a process in the same words.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mooncake_engine.cli import main as engine_main
from mooncake_hal.cli import main as hal_main
from mooncake_hal.command_line import describe_exit as by_engine, load_development_module
from mooncake_proxy.ops.worker_processes import describe_exit as by_proxy


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
def test_the_end_of_a_process_is_described(
    describe: Callable[[int], str], status: int, said: str
) -> None:
    assert describe(status) == said


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """What a missing package looks like to an import."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("main", "package", "arguments"),
    [
        (hal_main, "mooncake_hal.bench", ["bench", "transfer", "--size", "1"]),
        (engine_main, "mooncake_engine.replay", ["bench", "--url", "http://127.0.0.1:1"]),
    ],
)
def test_a_bench_that_is_not_installed_says_what_to_install(
    main: Callable[[Sequence[str]], int],
    package: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide(monkeypatch, package)
    assert main(arguments) == 1
    assert "`pip install 'mooncake-hal[testing]'`" in capsys.readouterr().err


def test_a_development_module_that_lacks_something_else_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tool.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        load_development_module("broken_tool")
