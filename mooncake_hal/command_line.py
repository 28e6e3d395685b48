"""Helpers shared by all our commands: argument parser, help format, log format, optional
development modules, exit statuses."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from mooncake_hal.errors import DevelopmentToolsMissing

LOG_FORMATS = ("text", "json")
_TEXT_START, _TEXT_END = "%(asctime)s %(levelname)s", "%(name)s: %(message)s"
_TEXT_LINE = f"{_TEXT_START} {_TEXT_END}"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line (the usage of a command with 80 options would hide the
    error) and suggest the option that a misspelt one was meant to be.

    Options can't be abbreviated: vLLM's ``--api-key KEY`` would be ``--api-key-file``, whose error
    shows the key.
    """

    _words: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        # Descriptions are docstrings, whose marks for code are those of the docs.
        return super().format_help().replace("``", "`")

    def error(self, message: str) -> NoReturn:
        command = _command_of(self, self._words)
        said = "; ".join([message, *self._suggestions(), f"see {command} --help"])
        self.exit(2, f"{command}: error: {said}\n")

    def _suggestions(self) -> Iterator[str]:
        # argparse reports `--model` as missing, and not that `--modle` is no option.
        known = set(_option_names(self))
        options = (word.partition("=")[0] for word in self._words if word.startswith("--"))
        for name in options:
            if name not in known:
                for nearest in difflib.get_close_matches(name, known, n=1, cutoff=0.8):
                    yield f"did you mean {nearest}, not {name}?"


def _command_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The command that the words name, of a parser or of its commands: argparse reports an unknown
    option of a command as one of the whole parser's."""
    for action in parser._actions:  # argparse offers no other way to them
        if isinstance(action, argparse._SubParsersAction):
            for at, word in enumerate(words):
                if word in action.choices:
                    return _command_of(action.choices[word], words[at + 1 :])
    return parser.prog


def _option_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of a parser and of those of its commands, as ``--name``."""
    for action in parser._actions:  # argparse offers no other way to them
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _option_names(command)


class DefaultsInHelp(argparse.HelpFormatter):
    """Appends the default to an option's help, unless the text already has it or there is none.

    The metavar is the unit: ``--timeout SECONDS ... (default: 25)``.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        has_none = default in (None, argparse.SUPPRESS, "", [], ()) or isinstance(default, bool)
        if has_none or "(default: " in text:
            return text
        if isinstance(default, float):
            shown = f"{default:g}"
        elif isinstance(default, (list, tuple)):
            shown = ",".join(map(str, default))
        else:
            shown = str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


class JsonLogLines(logging.Formatter):
    """Formats every record as one line of JSON, even if its message has several lines: ``time`` in
    seconds since 1970, ``level``, ``logger``, ``message``, and ``exception`` if there is a
    traceback.

    Args:
        worker: name of this process among several of the same kind; empty if it is the only one.
    """

    def __init__(self, worker: str = "") -> None:
        super().__init__()
        self._named = {"worker": worker} if worker else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            **self._named,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Log settings of a process, which it passes to its child processes.

    Args:
        level: lowest level that is logged, as ``logging`` numbers it.
        format: one of ``LOG_FORMATS``.
        worker: name of the process in every line, if there are several of the same kind.
    """

    level: int = logging.WARNING
    format: str = "text"
    worker: str = ""

    @classmethod
    def current(cls) -> LogSettings:
        """The settings of this process."""
        root = logging.getLogger()
        is_json = any(isinstance(each.formatter, JsonLogLines) for each in root.handlers)
        return cls(root.level, "json" if is_json else "text")

    def apply(self) -> None:
        """Configure logging to standard error, unless this process has configured logging already.
        With JSON, Python's own warnings are logged as JSON, too."""
        handler = logging.StreamHandler(sys.stderr)
        is_json = self.format == "json"
        text_line = f"{_TEXT_START} {self.worker} {_TEXT_END}" if self.worker else _TEXT_LINE
        handler.setFormatter(JsonLogLines(self.worker) if is_json else logging.Formatter(text_line))
        logging.basicConfig(level=self.level, handlers=[handler])
        if is_json:
            logging.captureWarnings(True)


def load_development_module(name: str) -> ModuleType:
    """Import a module that is packaged in mooncake-hal-testing, not in the wheels for serving.

    Raises:
        DevelopmentToolsMissing: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise DevelopmentToolsMissing(
            f"{name} is not installed: it is a development tool, which is not part of the packages "
            "for serving; install the wheel mooncake_hal_testing of this release"
        ) from exc


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while torch or another large package is imported. What an import
    makes lives on, and each collection looks at it again: 0.1 of 1.7 s with torch and the
    engine."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_path() -> str:
    """``PYTHONPATH`` for our child processes, which must be able to import everything that this
    process can, extensions in particular."""
    return os.pathsep.join(filter(None, sys.path))


def describe_exit(status: int) -> str:
    """Describe a return code of ``subprocess``; a negative one is the number of a signal."""
    if status >= 0:
        return f"exited with status {status}"
    if -status == signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out: see dmesg"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-status}"
    return f"killed by {name}"
