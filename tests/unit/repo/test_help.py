"""The option descriptions in ``--help`` of every command."""

from __future__ import annotations

import argparse

import pytest

from mooncake_conductor import argument_parser, cli as conductor
from mooncake_engine import cli as engine
from mooncake_hal import bench, cli as hal, command_line, doctor
from mooncake_kv import cli as kv
from mooncake_proxy import proxy_options as proxy

FORMATTERS = (command_line.DefaultsInHelp, argument_parser.DefaultsInHelp)


def parsers() -> dict[str, argparse.ArgumentParser]:
    found = {"mooncake-proxy": proxy.build_parser()}
    for module in (conductor, kv):
        commands = next(
            action
            for action in module.build_parser()._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        found.update({parser.prog: parser for parser in commands.choices.values()})
    for command in engine.COMMANDS:
        found[command.name] = argparse.ArgumentParser(formatter_class=command_line.DefaultsInHelp)
        command.add_to(found[command.name])
    for name, module in (("doctor", doctor), ("bench transfer", bench)):
        found[name] = argparse.ArgumentParser(formatter_class=command_line.DefaultsInHelp)
        module.add_arguments(found[name])
    return found


@pytest.mark.parametrize("command", parsers())
def test_every_option_has_description_and_default(command: str) -> None:
    parser = parsers()[command]
    for action in parser._actions:
        assert action.help, f"{action.dest} is not explained"
        said = parser._get_formatter()._expand_help(action)
        number = isinstance(action.default, (int, float)) and not isinstance(action.default, bool)
        if number or action.default not in (None, False, "", [], argparse.SUPPRESS):
            assert said.count("(default: ") == 1, said
        assert said.lower().count("default:") == said.count("(default: "), "in one form only"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor"], "(default: role=both,host=127.0.0.1,"),
        (["bench", "transfer"], "(default: 4096,65536,1048576)"),
    ],
)
def test_lazily_loaded_commands_show_their_options(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        hal.main([*arguments, "--help"])
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"]])
def test_help_has_no_marks_of_the_docs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        hal.main(arguments)
    help_text = capsys.readouterr().out
    assert "`mooncake-hal" in help_text
    assert "``" not in help_text


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize(
    ("default", "said"),
    [
        (0, "so many (default: 0)"),
        (25.0, "so many (default: 25)"),
        (0.01, "so many (default: 0.01)"),
        ("50%", "so many (default: 50%)"),
        ((1, 2), "so many (default: 1,2)"),
        (None, "so many"),
        ("", "so many"),
        ([], "so many"),
        (False, "so many"),
    ],
)
def test_default_is_shown_at_the_end(
    formatter: type[argparse.HelpFormatter], default: object, said: str
) -> None:
    parser = argparse.ArgumentParser(formatter_class=formatter)
    parser.add_argument("--number", default=default, help="so many")
    assert parser.format_help().rstrip().endswith(said)


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_default_described_in_words_is_not_repeated(
    formatter: type[argparse.HelpFormatter],
) -> None:
    parser = argparse.ArgumentParser(formatter_class=formatter)
    parser.add_argument("--number", default=0, help="so many (default: all)")
    assert parser.format_help().rstrip().endswith("so many (default: all)")
