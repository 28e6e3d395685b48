"""Common behaviour of our commands: exit descriptions, error lines, missing tools, Ctrl-C.

Proxy and conductor share no code with the others, but describe the end of a process and a misspelt
option in the same words.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from mooncake_conductor import cli as conductor_cli
from mooncake_engine.cli import main as engine_main
from mooncake_hal import __version__, cli as hal_cli
from mooncake_hal.cli import main as hal_main
from mooncake_hal.command_line import (
    collector_paused,
    describe_exit as by_engine,
    load_development_module,
)
from mooncake_kv import cli as kv_cli
from mooncake_proxy.cli import main as proxy_main
from mooncake_proxy.ops.worker_processes import describe_exit as by_proxy


@pytest.mark.parametrize("describe", [by_engine, by_proxy])
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL, as the kernel does when memory runs out: see dmesg"),
        (-(signal.SIGRTMIN + 1), f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_exit_status_is_described(
    describe: Callable[[int], str], status: int, message: str
) -> None:
    assert describe(status) == message


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (
            engine_main,
            ["serve", "--modle", "x"],
            "required: --model; did you mean --model, not --modle?",
        ),
        (
            engine_main,
            ["serve", "--model", "x", "--prot=1"],
            "--prot=1; did you mean --port, not --prot?",
        ),
        (
            engine_main,
            ["serve", "--model", "x", "--frobnicate"],
            "unrecognized arguments: --frobnicate; see mooncake-engine serve --help",
        ),
        (
            engine_main,
            ["serve", "--model", "x", "--max-model-le", "1"],
            "--max-model-le 1; did you mean --max-model-len, not --max-model-le?; see",
        ),
        (kv_cli.main, ["stats", "--prot", "1"], "mooncake-kv stats: error: unrecognized arguments"),
        (hal_main, ["devices", "--frobnicate"], "see mooncake-hal devices --help"),
        (
            conductor_cli.main,
            ["simulate", "trace", "--polcy", "cost"],
            "did you mean --policy, not --polcy?; see mooncake-conductor simulate --help",
        ),
        (proxy_main, ["--polcy", "cost"], "--polcy cost; did you mean --policy, not --polcy?; see"),
        (proxy_main, ["--prot=1"], "arguments: --prot=1; did you mean --port, not --prot?; see"),
        (proxy_main, ["--frobnicate"], "arguments: --frobnicate; see mooncake-proxy --help"),
        (proxy_main, ["--max-runnin", "1"], "--max-runnin 1; did you mean --max-running, not"),
    ],
)
def test_misspelt_option_is_corrected(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[Sequence[str]], int],
    words: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make imports of a package fail as if it were not installed."""
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
def test_missing_benchmark_names_the_package_to_install(
    main: Callable[[Sequence[str]], int],
    package: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide(monkeypatch, package)
    assert main(arguments) == 1
    assert "install the wheel mooncake_hal_testing" in capsys.readouterr().err


def test_development_module_with_a_missing_import_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tool.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        load_development_module("broken_tool")


Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("main", "command", "wrong"),
    [
        (engine_main, "mooncake-engine serve", ["serve", "--model", "m", "--port", "a"]),
        (kv_cli.main, "mooncake-kv store", ["store", "--dram", "a"]),
        (hal_main, "mooncake-hal doctor", ["doctor", "--instance", "a"]),
        (
            engine_main,
            "mooncake-engine bench serve",
            ["bench", "serve", "--model", "m", "--extra-body", "a"],
        ),
        (conductor_cli.main, "mooncake-conductor compare", ["compare", "trace", "--limit", "a"]),
        (proxy_main, "mooncake-proxy", ["--port", "a"]),
    ],
)
def test_invalid_option_prints_one_line_without_usage(
    main: Main, command: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    message = capsys.readouterr().err
    assert message.startswith(f"{command}: error: argument {wrong[-2]}: ")
    assert message.endswith(f"'a'; see {command} --help\n")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "main", [engine_main, kv_cli.main, hal_main, conductor_cli.main, proxy_main]
)
def test_every_command_prints_its_version(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [
        (hal_cli, "show_devices", ["devices"]),
        (kv_cli, "show_stats", ["stats"]),
        (conductor_cli, "simulate", ["simulate", "trace.jsonl"]),
    ],
)
def test_ctrl_c_exits_with_130_without_traceback(
    module: ModuleType, function: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupted)
    assert module.main(words) == 130


def test_ctrl_c_while_the_proxy_loads_exits_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        assert proxy_main([]) == 2  # no instances to serve with
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_garbage_is_collected_again_after_a_pause() -> None:
    with collector_paused():
        assert not gc.isenabled()
    with suppress(ImportError), collector_paused():
        raise ImportError("a package that is not installed")
    assert gc.isenabled()
