"""Changed files are read again once they are complete, and broken ones change nothing."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.ops.reloaded_files import ReloadedFiles, stamps_of, with_current_keys
from mooncake_proxy.proxy_options import build_parser

KEY = {"key": "a-key-of-one-team", "name": "team"}


def write(path: Path, text: str) -> None:
    """Replace a file, as editors and `kubectl` do: another inode, whatever the clock says."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def test_files_are_read_once_when_they_have_settled(tmp_path: Path) -> None:
    one, other, found = tmp_path / "one", tmp_path / "other", []
    one.write_text("1")
    paths = (str(one), str(other))
    files = ReloadedFiles("x", paths, lambda: found.append(one.read_text()), stamps_of(*paths))
    files.look()
    assert found == []
    write(one, "2")
    files.look()
    write(other, "")
    files.look()
    assert found == [], "the other file was written since the last look"
    files.look()
    files.look()
    assert found == ["2"]
    other.unlink()
    files.look()
    files.look()
    assert found == ["2", "2"]


def test_what_was_written_since_the_start_read_it_is_noticed(tmp_path: Path) -> None:
    path, found = tmp_path / "one", []
    path.write_text("1")
    before = stamps_of(str(path))
    write(path, "2")
    files = ReloadedFiles("x", (str(path),), lambda: found.append(path.read_text()), before)
    for _ in range(3):
        files.look()
    assert found == ["2"]


def test_a_broken_file_is_named_and_read_again_only_if_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "one"

    def read() -> None:
        raise ConfigError("not a key")

    files = ReloadedFiles("keys", (str(path),), read, stamps_of(str(path)))
    write(path, "1")
    for _ in range(4):
        files.look()
    assert caplog.messages == ["keys not reloaded, the former stay in use: not a key"]


def test_keys_of_the_files_replace_the_former_ones(tmp_path: Path) -> None:
    clients, admins = tmp_path / "keys.json", tmp_path / "admins"
    clients.write_text(json.dumps({"keys": [KEY]}))
    admins.write_text("the-key-of-an-admin\n")
    flags = ["--backend-url", "http://d:1", "--api-key-file", str(clients)]
    config = config_from(build_parser().parse_args([*flags, "--admin-key-file", str(admins)]))
    write(clients, json.dumps({"keys": [KEY | {"weight": 2}, {"key": "of-another-team-1"}]}))
    write(admins, "the-key-of-another-admin\n")
    found = with_current_keys(config)
    assert found.api_keys == {"a-key-of-one-team", "of-another-team-1"}
    assert [each.weight for each in found.tenants] == [2.0]
    assert found.admin_keys == {"the-key-of-another-admin"}
    for content, message in (
        (b'{"keys": []}', "holds no key"),
        (b"\xff", "key file"),
        (json.dumps({"keys": [KEY | {"classes": ["fast"]}]}).encode(), "no class fast"),
    ):
        clients.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            with_current_keys(config)
    clients.write_text(json.dumps({"keys": [KEY]}))
    admins.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="wanted one key per line"):
        with_current_keys(config)


def test_changed_classes_wait_for_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [KEY], "classes": {"fast": {"ttft": 100}}}))
    flags = ["--backend-url", "http://d:1", "--policy", "cost", "--api-key-file", str(path)]
    config = config_from(build_parser().parse_args(flags))
    with caplog.at_level(logging.WARNING):
        with_current_keys(config)
        assert caplog.messages == []
        path.write_text(json.dumps({"keys": [KEY], "classes": {"fast": {"ttft": 200}}}))
        assert with_current_keys(config).conductor == config.conductor
    [message] = caplog.messages
    assert message.endswith("class fast has changed, which takes effect at the next start")
