"""The proxy installs into an empty environment without torch, with only its imported
dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = [str(ROOT / name) for name in ("api", "conductor", "proxy")]


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with only the proxy installed."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *PACKAGES],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.mark.timeout(300)
def test_proxy_installs_no_torch_and_only_imported_siblings(
    empty_environment: Path,
) -> None:
    listed = subprocess.run(
        [str(empty_environment / "bin/python"), "-m", "pip", "list", "--format=json"],
        check=True,
        capture_output=True,
        text=True,
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "mooncake-proxy" in names
    assert not names & {"torch", "transformers"}
    siblings = {name for name in names if name.startswith("mooncake-")}
    assert siblings == {"mooncake-proxy", "mooncake-conductor", "mooncake-api"}


@pytest.mark.timeout(300)
def test_proxy_runs_in_empty_environment(empty_environment: Path) -> None:
    command = [str(empty_environment / "bin/mooncake-proxy"), "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--prefill" in done.stdout
