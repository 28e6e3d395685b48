"""What the doctor says of arguments that it can't work with."""

from __future__ import annotations

import base64
from contextlib import closing
from pathlib import Path

import pytest

from mooncake_hal import cli, doctor
from mooncake_hal.registry import Registry
from mooncake_hal.session import addressing
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp


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
    ],
)
def test_a_wrong_command_line_is_status_2(
    arguments: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--file", "--secret-file"])
def test_a_missing_file_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", option, str(tmp_path / "missing")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"mooncake-hal: can't read {option}: ")
    assert "missing" in said


@pytest.mark.parametrize("content", ["{}", "instances: []", "[]", '{"instances": ["prefill"]}'])
def test_a_file_of_another_form_is_told_the_right_one(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan").write_text(content)
    assert cli.main(["doctor", "--file", str(tmp_path / "plan")]) == 1
    assert 'wanted JSON such as {"instances": [{"role": "prefill"}]}' in capsys.readouterr().err


@pytest.mark.parametrize("key", ["tp", "pp", "block_size", "http", "kv"])
def test_what_is_no_number_is_a_finding(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--instance", f"backend=cpu,{key}=many"]) == 1
    assert "wanted a number, got 'many'" in capsys.readouterr().out


def test_a_deployment_without_a_secret_is_tried_from_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addressing, "is_loopback", lambda _: False)
    with closing(load_tcp().open(EndpointOptions(allow_no_secret=True))) as far:
        ranks = [{"endpoints": {"tcp": base64.b64encode(far.address).decode()}}]
        [tried] = doctor._try_ranks(Registry.discover(), ranks, "127.0.0.1", b"")
    assert tried == doctor.Check("rank 0 over tcp")
