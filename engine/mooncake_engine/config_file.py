"""``--config FILE``: options of a command line, written down.

model: /models/Qwen3-0.6B
kv-cache-bytes: 8G
served-model-name: [qwen, Qwen3-0.6B]
enforce-eager: true
prefill-args:
  tp-size: 2
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_hal.options import Option

CONFIG_FILE = Option(
    flag="--config",
    parse=Path,
    metavar="FILE",
    help="YAML or JSON file with options by name; the command line overrides it",
)


NO_SECTIONS: Mapping[str, Sequence[Option]] = MappingProxyType({})


def with_config(
    argv: Sequence[str],
    commands: Mapping[str, Sequence[Option]],
    sections: Mapping[str, Sequence[Option]] = NO_SECTIONS,
) -> list[str]:
    """A command line with the options of its files, each before those that were written by hand.

    Args:
        argv: the command and its options.
        commands: the options of each command.
        sections: names of options whose value is a command line of its own, and what it may hold.

    Raises:
        ConfigError: a file can't be read, or holds what is no option of the command.
    """
    options = commands.get(argv[0], ()) if argv else ()
    if CONFIG_FILE not in options:
        return list(argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(CONFIG_FILE.flag, type=Path, action="append", default=[])
    try:
        found, _ = finder.parse_known_args(argv[1:])
    except SystemExit:  # --config without a file: the command's own parser says so
        return list(argv)
    by_name = _by_name(option for option in options if option is not CONFIG_FILE)
    written: list[str] = []
    for path in found.config:
        values = _read(path)
        for name, value in list(values.items()):
            key = name.replace("-", "_")
            if key in by_name and key in sections and isinstance(value, dict):
                held = _by_name(sections[key])
                words = shlex.join(_words_of(path, values.pop(name), held))
                written.append(f"{by_name[key].flag}={words}")
        written += _words_of(path, values, by_name)
    return [argv[0], *written, *argv[1:]]


def _by_name(options: Iterable[Option]) -> dict[str, Option]:
    return {name: option for option in options for name in option.names}


def _read(path: Path) -> dict[str, Any]:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        return decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"can't read --config {path}: {exc}") from exc


def _words_of(
    path: Path, values: Mapping[str, Any], options: Mapping[str, Option]
) -> Iterator[str]:
    for name, value in values.items():
        option = options.get(name.replace("-", "_"))
        if option is None:
            raise ConfigError(f"--config {path}: {name!r} is no option of this command")
        yield from _words(option, value, path)


def _words(option: Option, value: Any, path: Path) -> Iterator[str]:
    """An option as it would be on the command line; null is as if it were not there, and so is
    false where it is the default."""
    if value is None:
        return
    name = option.flag.removeprefix("--")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        raise ConfigError(f"--config {path}: {name} can't be {value!r}")
    if option.is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"--config {path}: {name} is true or false, got {value!r}")
        yield from option.words(value)
    else:
        yield from option.words(values)
