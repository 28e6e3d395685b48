"""Argument parser and help format of the commands `mooncake-conductor` and `mooncake-proxy`; the
other commands have their own, since neither side imports the other."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line (the usage of a command with 80 options would hide the
    error) and suggest the option that a misspelt one was meant to be. Options can't be abbreviated:
    `--api-key KEY` would be `--api-key-file`, whose error shows the key."""

    _words: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        command = _command_of(self, self._words)
        said = "; ".join([message, *self._suggestions(), f"see {command} --help"])
        self.exit(2, f"{command}: error: {said}\n")

    def _suggestions(self) -> Iterator[str]:
        # argparse may report a missing argument, and not that an option does not exist.
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


def byte_count(text: str) -> int:
    """Parse an option's value as a number of bytes, such as ``512M``, ``1.5G`` or ``64MiB``; the
    other commands' options accept the same."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(number[-1:], 1)
    try:
        num_bytes = int(float(number[:-1] if unit > 1 else number) * unit)
    except (ValueError, OverflowError):
        num_bytes = -1
    if num_bytes < 0:
        raise argparse.ArgumentTypeError(f"wanted bytes such as 512M or 4G, got {text!r}")
    return num_bytes


class DefaultsInHelp(argparse.HelpFormatter):
    """Appends an option's default to its help, unless it has none or the text states it already.

    Metavars give the unit: `--timeout SECONDS ... (default: 25)`.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not _has_default(action) or "(default: " in text:
            return text
        return f"{text} (default: {_shown(action.default).replace('%', '%%')})"


def _has_default(action: argparse.Action) -> bool:
    default = action.default
    if default is argparse.SUPPRESS or default is None or isinstance(default, bool):
        return False
    return default not in ("", [], ())


def _shown(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default))
    return str(default)
