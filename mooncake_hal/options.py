"""Command-line options that are declared once, as metadata of the dataclass field that they fill.

The argument parser, ``--help``, the reader of configuration files and the tables in the docs are
all generated from that metadata::

    @dataclass(frozen=True, slots=True)
    class Config:
        tp_size: int = field(default=1, metadata=option(metavar="N", help="tensor-parallel ranks"))

    options = options_of(Config)                       # --tp-size N
    add_to_parser(parser, options)
    config = from_arguments(Config, parser.parse_args())
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from mooncake_hal.port_range import MAX_PORT, PortRange

Config = TypeVar("Config")

MIN_SECRET_BYTES = 16
"""Length of the shortest secret that is accepted. Proofs are HMACs, so whoever has recorded one can
try guesses of the secret at home, as fast as their machines can."""

_KEY = "option"
_SCALARS = (int, float, str, Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command.

    Args:
        flag: the flag, such as ``--tp-size``.
        aliases: alternative flags, such as vLLM's ``--tensor-parallel-size``.
        help: what it does, with its unit; the default is appended to it.
        field: name of the dataclass field that it fills; empty for an option of the command itself.
        metavar: placeholder for the value in help.
        parse: converts the text to the parsed argument; raises ValueError or
            ``argparse.ArgumentTypeError``.
        to_field: converts the parsed argument to the field's value.
        default: the parsed argument if the option is not given.
        default_text: the default in words, if the value alone is not clear.
        choices: the accepted texts; empty: any.
        is_switch: takes no value; its presence sets True, or False for a ``--no-...`` flag.
        is_negatable: a switch that has both forms; None if neither is given.
        nargs: ``+`` for several values after one flag.
        is_repeated: the flag may be given several times, with one value each.
        is_required: the option has no default.
    """

    flag: str
    help: str
    field: str = ""
    metavar: str | None = None
    parse: Callable[[str], Any] = str
    to_field: Callable[[Any], Any] | None = None
    default: Any = None
    default_text: str = ""
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    is_negatable: bool = False
    nargs: str | None = None
    is_repeated: bool = False
    is_required: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in a configuration file; the first one is ``name``."""
        return tuple(flag.lstrip("-").replace("-", "_") for flag in (self.flag, *self.aliases))

    @property
    def name(self) -> str:
        """Its name in a configuration file and in the parsed arguments, with underscores."""
        return self.flag.removeprefix("--").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        text = f"{self.help} (default: {self.default_text})" if self.default_text else self.help
        if self.is_switch:
            if self.is_negatable:
                both = argparse.BooleanOptionalAction
                parser.add_argument(*self._flags, action=both, default=None, help=text)
            else:
                parser.add_argument(*self._flags, action="store_true", help=text)
            return
        kwargs: dict[str, Any] = {"help": text, "default": self.default, "type": self.parse}
        if self.metavar is not None:
            kwargs["metavar"] = self.metavar
        if self.choices:
            kwargs["choices"] = self.choices
        if self.nargs is not None:
            kwargs["nargs"] = self.nargs
        if self.is_repeated:
            kwargs |= {"action": "append", "default": []}
        parser.add_argument(*self._flags, required=self.is_required, **kwargs)

    @property
    def _flags(self) -> tuple[str, ...]:
        return (self.flag, *self.aliases)

    def words(self, value: object) -> Iterator[str]:
        """Yield the command-line words that set the option to a parsed argument's value; none for
        None, an empty list, or False of a switch without ``--no-...``."""
        if value is False and self.is_negatable:
            yield self.flag.replace("--", "--no-", 1)
        if value is None or value is False or value == []:
            return
        values = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
        if self.nargs is None and not self.is_repeated:
            values = [",".join(values)]
        if self.is_switch:
            yield self.flag
        elif self.nargs is not None:
            yield from (self.flag, *values)
        else:
            for one in values:
                yield from (self.flag, one)


def option(
    flag: str = "", *, unit: int | None = None, is_unset_by_default: bool = False, **parts: Any
) -> dict[str, Any]:
    """Metadata for a dataclass field that an option fills. The value's type, the default and
    whether the option is required follow from the field unless they are given.

    Args:
        flag: the flag; by default ``--`` and the field's name, for switches ``--no-...`` if the
            field's default is True and both forms if it is None.
        unit: factor from the command line's unit to the field's, such as bytes per GiB.
        is_unset_by_default: whether the parsed argument is None if the option is not given, so that
            a command can tell; help shows the field's default anyway.
        parts: other fields of ``Option``.
    """
    return {_KEY: {"flag": flag, "unit": unit, "is_unset": is_unset_by_default, **parts}}


def options_of(
    config: type, *, only: Collection[str] = (), without: Collection[str] = ()
) -> tuple[Option, ...]:
    """The options of a dataclass's fields, in field order.

    Args:
        only: names of the fields to include; empty: all.
        without: names of fields to leave out.
    """
    hints = typing.get_type_hints(config)
    return tuple(
        _option(field, hints[field.name])
        for field in dataclasses.fields(config)
        if _KEY in field.metadata and field.name not in without and (not only or field.name in only)
    )


def add_to_parser(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add all of the options to a parser."""
    for option in options:
        option.add_to(parser)


def from_arguments(config: type[Config], args: argparse.Namespace, **others: Any) -> Config:
    """Construct a dataclass from parsed arguments. A field whose option is None or not among the
    arguments keeps its default; fields in ``others`` are set to the values given there."""
    values = dict(others)
    for option in options_of(config):
        value = getattr(args, option.name, None)
        if value is not None and option.field not in others:
            values[option.field] = value if option.to_field is None else option.to_field(value)
    return config(**values)


def markdown_table(options: Sequence[Option]) -> str:
    """The options as a Markdown table for the docs: flag with its value, default, meaning."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in options:
        value = option.metavar or "|".join(option.choices)
        flag = f"{option.flag} {value}" if value and not option.is_switch else option.flag
        default = option.default_text or _shown_default(option)
        shown = f"`{flag}`, `--no-{flag[2:]}`" if option.is_negatable else f"`{flag}`"
        shown = ", ".join([shown, *(f"`{alias}`" for alias in option.aliases)])
        cells = (shown, default, option.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def positive_int(text: str) -> int:
    """Parse an option's value as an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1, got {text!r}")
    return number


def port_number(text: str) -> int:
    """Parse an option's value as a TCP port, 0 to 65535."""
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"wanted a port, 0 to {MAX_PORT}, got {text!r}")
    return int(text)


def finite_number(text: str) -> float:
    """Parse an option's value as a number that is neither infinite nor NaN. NaN would pass the
    bounds of most options, since every comparison with it is false."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"wanted a number, got {text!r}")
    return number


def byte_count(text: str) -> int:
    """Parse an option's value as a number of bytes, such as ``512M``, ``1.5G`` or ``64GiB``."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(number[-1:], 1)
    try:
        nbytes = int(float(number[:-1] if unit > 1 else number) * unit)
    except (ValueError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise argparse.ArgumentTypeError(f"wanted bytes such as 512M or 4G, got {text!r}")
    return nbytes


def read_secret_file(path: Path, flag: str, advice: str, refused: type[Exception]) -> str:
    """Read a secret from a file; a command line would be visible to every user of the host.

    Args:
        path: the file, with one secret per line; white space around it is ignored.
        flag: the option that named the file, for messages.
        advice: what to do about an empty file, for messages.
        refused: exception type to raise if the file can't be read, or holds a secret of less than
            MIN_SECRET_BYTES.

    Returns:
        The secrets, one per line. The first one is the newest: see ``split_secrets``.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise refused(f"can't read {flag}: {exc}") from exc
    found = [line for line in lines if line]
    if not found:
        raise refused(f"{flag} {path} is empty; {advice}")
    if (length := min(len(line.encode()) for line in found)) < MIN_SECRET_BYTES:
        raise refused(
            f"{flag} {path} holds a secret of {length} bytes, which can be guessed: at least "
            f"{MIN_SECRET_BYTES} are needed; openssl rand -hex 32 makes one"
        )
    return "\n".join(found)


def port_range(text: str) -> PortRange:
    """Parse an option's value as a port range, such as ``14000-14099``."""
    try:
        return PortRange.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _shown_default(option: Option) -> str:
    if option.is_required:
        return "required"
    if option.is_switch and not option.is_negatable:
        return "off"
    if option.default in (None, "", [], ()):
        return ""
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    parts: dict[str, Any] = dict(field.metadata[_KEY])
    flag, unit, is_unset = parts.pop("flag"), parts.pop("unit"), parts.pop("is_unset")
    kind = _without_none(hint)
    has_default = field.default is not dataclasses.MISSING
    default: Any = field.default if has_default else None
    name = field.name.replace("_", "-")
    if kind is bool and default is None and has_default:
        parts = {"flag": flag or f"--{name}"} | parts
        return Option(field=field.name, is_switch=True, is_negatable=True, **parts)
    if kind is bool:
        negated = {"flag": flag or f"--no-{name}", "to_field": lambda value: not value}
        parts = (negated if default else {"flag": flag or f"--{name}"}) | parts
        return Option(field=field.name, is_switch=True, default=False, **parts)
    if isinstance(kind, type) and issubclass(kind, Enum):
        parts = {"choices": tuple(str(one.value) for one in kind), "to_field": kind} | parts
        default = default.value if isinstance(default, Enum) else default
    elif kind in _SCALARS:
        parts = {"parse": finite_number if kind is float else kind} | parts
    if unit is not None:
        parts |= {"parse": finite_number, "to_field": lambda value: int(value * unit)}
        default = None if default is None else default / unit
    if typing.get_origin(kind) is tuple:
        parts = {"to_field": tuple} | parts
        default = []
    if is_unset and default is not None:
        parts = {"default_text": str(default)} | parts
        default = None
    parts = {"default": default, "is_required": not has_default} | parts
    return Option(flag=flag or f"--{name}", field=field.name, **parts)


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint
