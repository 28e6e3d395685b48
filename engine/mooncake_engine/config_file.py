"""``--config FILE``: options of a command line, written down.

model: /models/Qwen3-0.6B
kv-cache-bytes: 8G
served-model-name: [qwen, Qwen3-0.6B]
enforce-eager: true
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake_engine.errors import ConfigError

_OPTION = "--config"


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Let a command have its options from a file."""
    parser.add_argument(
        _OPTION,
        type=Path,
        metavar="FILE",
        help="YAML or JSON with options by name; those of the command line come after them",
    )


def with_config(argv: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """A command line with the options of its files, each before those that were written by hand.

    Args:
        argv: the command and its options.
        commands: the parser of each command.

    Raises:
        ConfigError: a file can't be read, or holds what is no option of the command.
    """
    parser = commands.get(argv[0]) if argv else None
    if parser is None or _OPTION not in parser._option_string_actions:
        return list(argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(_OPTION, type=Path, action="append", default=[])
    try:
        found, _ = finder.parse_known_args(argv[1:])
    except SystemExit:  # --config without a file: the command's own parser says so
        return list(argv)
    written = [word for path in found.config for word in _words_of(path, parser)]
    return [argv[0], *written, *argv[1:]]


def _words_of(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    for name, value in _read(path).items():
        flag = "--" + name.replace("_", "-")
        action = parser._option_string_actions.get(flag)
        if action is None or flag == _OPTION:
            raise ConfigError(f"{_OPTION} {path}: {name!r} is no option of this command")
        yield from _words(flag, value, action, path)


def _words(flag: str, value: Any, action: argparse.Action, path: Path) -> Iterator[str]:
    """An option as it would be on the command line; null and false are as if it were not there."""
    takes_value = action.nargs != 0
    if value is None or (value is False and not takes_value):
        return
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        raise ConfigError(f"{_OPTION} {path}: {flag[2:]} can't be {value!r}")
    if not takes_value:
        if value is not True:
            raise ConfigError(f"{_OPTION} {path}: {flag[2:]} is true or false, got {value!r}")
        yield flag
    elif action.nargs == "+":
        yield from (flag, *map(str, values))
    else:
        for one in values:
            yield from (flag, str(one))


def _read(path: Path) -> dict[str, Any]:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        options: dict[str, Any] = decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"can't read {_OPTION} {path}: {exc}") from exc
    return options
