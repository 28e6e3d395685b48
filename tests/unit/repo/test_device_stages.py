"""Stages of an accelerator's tests: each ends by itself, and says how far it came; a host's own
interpreter finds the project without anything installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_stages", ROOT / "ci/device_stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


stages = load()


@pytest.mark.parametrize("run", ["test-cuda", "bench-cuda", "test-ascend"])
def test_every_stage_is_short_and_about_files_that_there_are(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stages.main([run, "--list"]) == 0
    listed = capsys.readouterr().out
    for stage in stages.RUNS[run]:
        assert stage.seconds <= 540
        assert stage.name in listed
        for word in stage.tests:
            assert not word.startswith("tests/") or (ROOT / word).exists()


def test_stages_of_a_run_cover_its_folder() -> None:
    for run, folder in (("test-cuda", "hardware/cuda"), ("bench-cuda", "benchmarks/cuda")):
        named = {word for stage in stages.RUNS[run] for word in stage.tests}
        for file in (ROOT / "tests" / folder).glob("test_*.py"):
            assert str(file.relative_to(ROOT)) in named


def test_without_a_device_nothing_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("not run: there is an NPU")
    assert stages.main(["test-ascend"]) == 77
    assert "skipped: no ascend device" in capsys.readouterr().out


def run_of(tmp_path: Path, content: str, **options: object) -> tuple[bool, str]:
    test = tmp_path / "test_it.py"
    test.write_text(content)
    stage = stages.Stage("it", "something", (str(test), "-p", "no:cacheprovider"), **options)
    passed = stages.run_stage(stage, tmp_path / "out", os.environ)
    return passed, (tmp_path / "out" / "summary.md").read_text()


def test_a_stage_that_passes_and_one_that_fails(tmp_path: Path) -> None:
    passed, summary = run_of(tmp_path, "def test_a(): pass\n")
    assert passed
    assert "it: passed" in summary
    assert "1 passed" in summary
    assert (tmp_path / "out" / "it.xml").exists()
    passed, summary = run_of(tmp_path, "def test_a(): assert False\n")
    assert not passed
    assert "it: failed, status 1" in summary


def test_a_stage_that_is_stopped_says_what_is_left(tmp_path: Path) -> None:
    content = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\ndef test_c(): pass\n"
    passed, summary = run_of(tmp_path, content, seconds=5)
    assert not passed
    assert "stopped after 5 s" in summary
    assert stages.progress("....  [ 40/100]\n.. [ 42/100]") == (
        "42 of 100 tests had ended, 58 are left"
    )


def test_what_is_missing_is_a_line(tmp_path: Path) -> None:
    passed, summary = run_of(tmp_path, "", needs="no_such_library")
    assert passed
    assert "it: not run: no_such_library is not here" in summary


@pytest.mark.skipif(sys.version_info < (3, 11), reason="not run: tomllib is Python 3.11's")
def test_the_project_is_found_without_being_installed(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("carried.py", "VALUE = 7\n")
    with zipfile.ZipFile(wheels / "pytest-0.1-py3-none-any.whl", "w") as archive:
        archive.writestr("pytest.py", "raise RuntimeError('over the host's')\n")
    environment = stages.host_environment(tmp_path / "out", wheels)
    code = (
        "import importlib.metadata as m, json, carried\n"
        "points = [p.name for p in m.entry_points(group='mooncake_hal')]\n"
        "print(json.dumps([points, m.version('mooncake-engine'), carried.VALUE]))"
    )
    # -S: nothing of what is installed here
    argv = [sys.executable, "-S", "-c", code]
    found = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    points, version, value = json.loads(found.stdout)
    assert {"cpu", "cuda", "ascend"} <= set(points)
    assert version
    assert value == 7
    assert not (tmp_path / "out" / "host" / "site" / "pytest.py").exists()
