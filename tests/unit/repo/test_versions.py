"""All distributions have the same version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_all_versions_and_pins_agree() -> None:
    script = ROOT / "ci/set-version.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_script_writes_the_version_of_every_distribution(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*pyproject.toml"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    projects = [Path(line) for line in tracked.stdout.split() if not line.startswith("docs/")]
    for file in (Path("ci/set-version.py"), *projects):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    subprocess.run([sys.executable, tmp_path / "ci/set-version.py", "9.8.7"], check=True)
    for project in projects:
        text = (tmp_path / project).read_text()
        assert '\nversion = "9.8.7"\n' in text, project
        assert "==0.1.0" not in text, project


@pytest.mark.parametrize(
    "package",
    [
        "mooncake_hal",
        "mooncake_kv",
        "mooncake_conductor",
        "mooncake_proxy",
        "mooncake_engine",
        "mooncake_hal_cpu",
    ],
)
def test_importing_is_free(package: str) -> None:
    code = (
        f"import {package}, sys, threading; "
        "assert 'torch' not in sys.modules, 'torch'; "
        "assert 'transformers' not in sys.modules, 'transformers'; "
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
