"""Options declared as dataclass fields: parsing, values, back to arguments, and the docs table."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from mooncake_hal.options import (
    Option,
    add_to_parser,
    byte_count,
    from_arguments,
    markdown_table,
    option,
    options_of,
    read_secret_file,
)


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Config:
    path: Path = field(metadata=option(metavar="FILE", help="what to read"))
    size: int = field(default=3, metadata=option(metavar="N", help="how many"))
    share: float | None = field(
        default=None, metadata=option(metavar="SHARE", help="how much", default_text="all of it")
    )
    room_bytes: int = field(
        default=2048, metadata=option("--room", unit=1024, metavar="KIB", help="memory in KiB")
    )
    limit: int | None = field(default=None, metadata=option(parse=byte_count, help="bytes"))
    color: Color = field(default=Color.RED, metadata=option(help="of the thing"))
    caching: bool = field(default=True, metadata=option(help="forget everything"))
    fast: bool = field(default=False, metadata=option(help="hurry"))
    eager: bool | None = field(default=None, metadata=option(help="now", default_text="depends"))
    names: tuple[str, ...] = field(
        default=(), metadata=option("--name", is_repeated=True, help="a name; repeat it")
    )
    depth: int = field(default=7, metadata=option(is_unset_by_default=True, help="how deep"))
    derived: int = 0


OPTIONS = options_of(Config)


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_to_parser(parser, OPTIONS)
    return parser.parse_args(argv)


def test_defaults_are_the_fields() -> None:
    assert from_arguments(Config, parse("--path", "x")) == Config(Path("x"))


def test_every_kind_of_field_is_filled() -> None:
    args = parse(
        *("--path", "x", "--size", "4", "--share", "0.5", "--room", "1.5", "--limit", "2K"),
        *("--color", "blue", "--no-caching", "--fast", "--name", "a", "--name", "b"),
        *("--depth", "1"),
    )
    expected = Config(
        Path("x"),
        4,
        0.5,
        1536,
        2048,
        Color.BLUE,
        caching=False,
        fast=True,
        names=("a", "b"),
        depth=1,
    )
    assert from_arguments(Config, args) == expected


def test_fields_without_options_are_passed_explicitly() -> None:
    config = from_arguments(Config, parse("--path", "x", "--size", "9"), derived=5, size=1)
    assert (config.derived, config.size) == (5, 1)


def test_missing_option_keeps_the_default() -> None:
    assert from_arguments(Config, argparse.Namespace(path=Path("x"))) == Config(Path("x"))


def test_options_can_be_selected() -> None:
    assert [one.flag for one in options_of(Config, only=("size", "fast"))] == ["--size", "--fast"]
    assert "--size" not in [one.flag for one in options_of(Config, without=("size",))]


def test_unset_option_is_distinguishable_from_its_default() -> None:
    assert parse("--path", "x").depth is None
    [depth] = options_of(Config, only=("depth",))
    assert depth.default_text == "7"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("size", 4, ["--size", "4"]),
        ("path", Path("x"), ["--path", "x"]),
        ("fast", True, ["--fast"]),
        ("fast", False, []),
        ("share", None, []),
        ("names", ["a", "b"], ["--name", "a", "--name", "b"]),
        ("names", [], []),
    ],
)
def test_value_becomes_arguments(name: str, value: Any, words: list[str]) -> None:
    [one] = options_of(Config, only=(name,))
    assert list(one.words(value)) == words


def test_several_values_follow_one_flag() -> None:
    several = Option(flag="--of", help="things", nargs="+")
    assert list(several.words(["a", "b"])) == ["--of", "a", "b"]


def test_markdown_table_lists_the_options() -> None:
    assert markdown_table(options_of(Config, without=("limit",))) == (
        "| option | default | meaning |\n"
        "|---|---|---|\n"
        "| `--path FILE` | required | what to read |\n"
        "| `--size N` | 3 | how many |\n"
        "| `--share SHARE` | all of it | how much |\n"
        "| `--room KIB` | 2 | memory in KiB |\n"
        "| `--color red\\|blue` | red | of the thing |\n"
        "| `--no-caching` | off | forget everything |\n"
        "| `--fast` | off | hurry |\n"
        "| `--eager`, `--no-eager` | depends | now |\n"
        "| `--name` |  | a name; repeat it |\n"
        "| `--depth` | 7 | how deep |\n"
    )


@pytest.mark.parametrize(
    ("words", "value"), [((), None), (("--eager",), True), (("--no-eager",), False)]
)
def test_switch_with_default_none_has_both_forms(
    words: tuple[str, ...], value: bool | None
) -> None:
    assert from_arguments(Config, parse("--path", "x", *words)).eager is value
    (eager,) = (one for one in OPTIONS if one.field == "eager")
    assert tuple(eager.words(value)) == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--share", "nan"), "--share: wanted a number, got 'nan'"),
        (("--share", "half"), "--share: wanted a number, got 'half'"),
        (("--room", "inf"), "--room: wanted a number, got 'inf'"),
        (("--limit", "-5G"), "--limit: wanted bytes such as 512M or 4G, got '-5G'"),
        (("--limit", "nan"), "--limit: wanted bytes such as 512M or 4G, got 'nan'"),
    ],
)
def test_numbers_are_finite_and_sizes_not_negative(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--path", "x", f"{words[0]}={words[1]}")
    assert message in capsys.readouterr().err


def read_secret(tmp_path: Path, text: str) -> str:
    path = tmp_path / "secret"
    path.write_text(text)
    return read_secret_file(path, "--secret-file", "put it there", ValueError)


def test_secret_file_holds_one_secret_per_line(tmp_path: Path) -> None:
    assert read_secret(tmp_path, "  the secret of all \n") == "the secret of all"
    two = read_secret(tmp_path, "\nthe secret of this year\n \r\nthe secret of last year\r\n")
    assert two == "the secret of this year\nthe secret of last year"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "is empty; put it there"),
        ("fifteen letters", "holds a secret of 15 bytes, which can be guessed"),
        ("the secret of all\nshort", "holds a secret of 5 bytes, which can be guessed"),
    ],
)
def test_file_without_a_good_secret_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_secret(tmp_path, text)
