"""``--config FILE``: reads command-line options from a YAML or JSON file.

model: /models/Qwen3-0.6B
kv-cache-bytes: 8G
served-model-name: [qwen, Qwen3-0.6B]
enforce-eager: true
prefill-args:
  tp-size: 2
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.vllm_flags import vllm_words
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
    """Returns a command line with the options of its ``--config`` files, which precede those typed
    on the command line, so that the latter override them.

    Args:
        argv: the command and its arguments.
        commands: the options of each command.
        sections: options whose value is a command line of its own, by name, and the options that
            are allowed in it.

    Raises:
        ConfigError: a file can't be read, or contains something that is no option of the command.
    """
    options = commands.get(argv[0], ()) if argv else ()
    if CONFIG_FILE not in options:
        return list(argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(CONFIG_FILE.flag, type=Path, action="append", default=[])
    try:
        found, _ = finder.parse_known_args(argv[1:])
    except argparse.ArgumentError:  # --config without a file: the command's parser reports it
        return list(argv)
    by_name = _by_name(option for option in options if option is not CONFIG_FILE)
    written: dict[str, list[str]] = {}  # by flag
    for path in found.config:
        values = _read(path)
        for name, value in list(values.items()):
            key = name.replace("-", "_")
            if key in by_name and key in sections and isinstance(value, dict):
                held = _by_name(sections[key])
                words = shlex.join(_joined(_words_by_flag(path, values.pop(name), held)))
                written[by_name[key].flag] = [f"{by_name[key].flag}={words}"]
        for name in list(values):
            if (of_vllm := _words_of_vllm(name, values[name], by_name)) is not None:
                del values[name]
                written[name] = of_vllm
        written |= _words_by_flag(path, values, by_name)
    typed = {word.partition("=")[0] for word in argv}
    for option in options:  # the parser would join a repeated option's values
        if option.is_repeated and not typed.isdisjoint((option.flag, *option.aliases)):
            written.pop(option.flag, None)
    return [argv[0], *_joined(written), *argv[1:]]


def _joined(written: Mapping[str, list[str]]) -> Iterator[str]:
    return chain.from_iterable(written.values())


def _words_of_vllm(name: str, value: Any, options: Mapping[str, Option]) -> list[str] | None:
    """The words for a name that only vLLM knows as an option; None for others. ``enable-x: false``
    is ``--no-enable-x`` there."""
    key = name.replace("-", "_")
    if key in options:
        return None
    if value is False and (negative := options.get(f"no_{key}")) is not None:
        return list(negative.words(True))
    return vllm_words(name, value)


def _by_name(options: Iterable[Option]) -> dict[str, Option]:
    return {name: option for option in options for name in option.names}


def _read(path: Path) -> dict[str, Any]:
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        decode = msgspec.json.decode if is_json else msgspec.yaml.decode
        values = decode(text, type=dict[str, Any])
    except (OSError, ValueError) as exc:  # msgspec's errors are ValueErrors, too
        raise ConfigError(f"can't read --config {path}: {exc}") from exc
    # The decoders silently keep the last of several equal keys.
    for name in _repeated_in_json(text) if is_json else _repeated_in_yaml(text):
        raise ConfigError(f"--config {path}: {name!r} is given more than once; keep one of them")
    return values


def _repeated_in_json(text: str) -> list[str]:
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        repeated.extend(_repeated([name for name, _ in pairs]))

    json.loads(text, object_pairs_hook=note)
    return repeated


def _repeated_in_yaml(text: str) -> Iterator[str]:
    import yaml  # only where there is such a file

    pending = [yaml.compose(text, Loader=yaml.SafeLoader)]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            yield from _repeated([key.value for key, _ in node.value])
            pending += [value for _, value in node.value]


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _words_by_flag(
    path: Path, values: Mapping[str, Any], options: Mapping[str, Option]
) -> dict[str, list[str]]:
    written: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for name, value in values.items():
        option = options.get(name.replace("-", "_"))
        if option is None:
            raise ConfigError(f"--config {path}: {name!r} is not an option of this command")
        if (other := given.setdefault(option.flag, name)) != name:
            raise ConfigError(f"--config {path}: {other!r} and {name!r} are the same option")
        written[option.flag] = list(_words(option, value, path))
    return written


def _words(option: Option, value: Any, path: Path) -> Iterator[str]:
    """Yields the words of an option as on the command line; none for null, or for a switch that is
    false by default and set to false."""
    if value is None:
        return
    name = option.flag.removeprefix("--")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        raise ConfigError(f"--config {path}: {name} can't be {value!r}")
    if option.is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"--config {path}: {name} must be true or false, got {value!r}")
        yield from option.words(value)
    else:
        yield from option.words(values)
