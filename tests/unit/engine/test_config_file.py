"""Options that are read from a ``--config`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_engine.cli import OPTIONS, SECTIONS, build_parser, main
from mooncake_engine.config_file import with_config
from mooncake_engine.errors import ConfigError
from mooncake_engine.instance_arguments import engine_argv

FILE = """
model: /models/m
kv-cache-bytes: 8G
served_model_name: [a, b/c]
transport: [shm, tcp]
enforce-eager: true
async-scheduling: false
max-model-len: 4096
memory-utilization: 0.5
tool-call-parser: null
"""


def parse(*argv: str) -> Any:
    return build_parser().parse_args(with_config(argv, OPTIONS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_options_are_read_from_the_file(file: Path, form: str) -> None:
    args = parse("serve", *form.format(file).split(" "))
    assert args.model == Path("/models/m")
    assert args.kv_cache_bytes == 8 << 30
    assert args.served_model_name == ["a", "b/c"]
    assert args.transport == ["shm", "tcp"]
    assert (args.enforce_eager, args.async_scheduling) == (True, False)
    assert (args.max_model_len, args.memory_utilization) == (4096, 0.5)
    assert args.tool_call_parser == "auto"


def test_role_sections_become_role_arguments(tmp_path: Path) -> None:
    path = tmp_path / "up.yaml"
    path.write_text(
        "model: m\nprefill: 2\nprefill-args:\n  tp-size: 2\n  enforce-eager: true\n"
        "decode_args: {max-num-seqs: 64}\n"
    )
    args = build_parser().parse_args(with_config(("up", "--config", str(path)), OPTIONS, SECTIONS))
    assert args.prefill == 2
    assert args.prefill_args == "--tp-size 2 --enforce-eager"
    assert args.decode_args == "--max-num-seqs 64"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prefill: {tp-size: 2}", "prefill can't be {'tp-size': 2}"),
        ("prefill-args: {port: 80}", "'port' is not an option"),
        ("prefill-args: {tp-size: {a: 1}}", "tp-size can't be"),
    ],
)
def test_invalid_section_is_rejected(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "up.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        with_config(("up", "--config", str(path)), OPTIONS, SECTIONS)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "model: a\nmodel: b\n", "'model' is given more than once"),
        (
            "a.yaml",
            "prefill-args:\n  tp-size: 1\n  tp-size: 2\n",
            "'tp-size' is given more than once",
        ),
        ("a.json", '{"model": "a", "model": "b"}', "'model' is given more than once"),
        (
            "a.yaml",
            "max-model-len: 1\nmax_model_len: 2\n",
            "'max-model-len' and 'max_model_len' are",
        ),
    ],
)
def test_duplicate_option_is_rejected(tmp_path: Path, name: str, content: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        with_config(("up", "--config", str(path)), OPTIONS, SECTIONS)


def test_command_line_overrides_the_file(file: Path) -> None:
    args = parse("serve", "--max-model-len", "7", "--config", str(file), "--model", "x")
    assert (args.max_model_len, args.model) == (7, Path("x"))


@pytest.mark.parametrize("typed", [["--transport", "tcp"], ["--transport=tcp"]])
def test_command_line_overrides_a_list_of_the_file(file: Path, typed: list[str]) -> None:
    assert parse("serve", "--config", str(file), *typed).transport == ["tcp"]


def test_later_file_overrides_a_list_of_an_earlier_one(file: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("transport: [rdma]")
    args = parse("serve", "--config", str(file), "--config", str(later))
    assert (args.transport, args.max_model_len) == (["rdma"], 4096)


def test_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode({"model": "m", "port": 1}))
    assert parse("serve", "--config", str(path)).port == 1


def test_up_passes_file_options_to_instances(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "up.yaml"
    path.write_text("model: m\nprefill: 2\nmax-model-len: 512\nthreads: 1\n")
    args = parse("up", "--config", str(path))
    assert args.prefill == 2
    assert engine_argv(args) == ("--model", "m", "--threads", "1", "--max-model-len", "512")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modell: m", "'modell' is not an option of this command"),
        ("config: other", "'config' is not an option of this command"),
        ("enforce-eager: 1", "enforce-eager must be true or false, got 1"),
        ("model: {a: b}", "model can't be {'a': 'b'}"),
        ("- model", "can't read --config"),
        ("model: [", "can't read --config"),
    ],
)
def test_invalid_file_contents_are_rejected(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse("serve", "--config", str(path))
    assert words in str(caught.value)
    assert main(["serve", "--config", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read --config"):
        parse("serve", "--config", str(tmp_path / "missing"))


def test_missing_file_name_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "x", "--config"])
    assert capsys.readouterr().err.count("expected one argument") == 1


def test_other_commands_ignore_config() -> None:
    assert with_config(["generate", "--config", "x"], OPTIONS) == ["generate", "--config", "x"]
    assert with_config([], OPTIONS) == []
    assert with_config(["serve", "--config"], OPTIONS) == ["serve", "--config"]
