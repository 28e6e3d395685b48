"""What the doctor says of arguments that it can't work with."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_hal import cli


def test_nothing_to_check_fails_and_names_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAIL  arguments")
    for flag in ("--instance", "--file", "--transport", "--peer"):
        assert flag in said


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("nonsense",), "unrecognized arguments: nonsense"),
        (("--instance", "prefill"), "--instance: wanted KEY=VALUE,... such as role=prefill"),
        (("--file", "{missing}"), "--file: can't read it"),
        (("--file", "{empty}"), 'wanted JSON such as {"instances": [{"role": "prefill"}]}'),
        (("--file", "{text}"), 'wanted JSON such as {"instances": [{"role": "prefill"}]}'),
        (("--secret-file", "{missing}"), "--secret-file: can't read it"),
    ],
)
def test_arguments_that_cant_be_read_are_status_2(
    arguments: tuple[str, ...], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / name for name in ("missing", "empty", "text")}
    paths["empty"].write_text("{}")
    paths["text"].write_text("instances: []")
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *(word.format(**paths) for word in arguments)])
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("key", ["tp", "pp", "block_size", "http", "kv"])
def test_what_is_no_number_is_a_finding(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--instance", f"backend=cpu,{key}=many"]) == 1
    assert "wanted a number, got 'many'" in capsys.readouterr().out
