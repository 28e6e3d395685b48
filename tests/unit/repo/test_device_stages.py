"""Stages of an accelerator's tests.

Each stage exits by itself and reports its progress; a stage that executed no test has failed;
metrics are judged as they arrive; the host's own interpreter finds the project without
installation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.deploy import ROOT, load_script
from support.figures import Figure

stages = load_script("device_stages")
MACHINE = stages.Machine("cpu", [{"name": "x", "total_bytes": 80 << 30}], "one x")
PASSING = "def test_a(): pass\n"
FIGURES = """
import pytest
from support.figures import Figure, record
@pytest.mark.parametrize("value", [{values}])
def test_it(benchmark, value):
    record(benchmark, Figure(f"figure {{value}}", value, 1.0, "times", context="of mine"))
    benchmark.pedantic(lambda: None, rounds=1)
"""


@pytest.fixture(autouse=True)
def _stages_are_not_xdist_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pytest-xdist process, a stage's own pytest would consider itself a worker and skip
    benchmarks."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.parametrize("run", ["test-cuda", "bench-cuda", "test-ascend"])
def test_every_stage_is_short_and_names_existing_files(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stages.main([run, "--list"]) == 0
    listed = capsys.readouterr().out
    for stage in stages.RUNS[run]:
        assert stage.seconds <= 540
        assert stage.name in listed
        for word in stage.tests:
            assert not word.startswith("tests/") or (ROOT / word).exists()


def test_stages_of_run_cover_its_folders() -> None:
    for run, folder in (
        ("test-cuda", "hardware/cuda"),
        ("bench-cuda", "benchmarks/cuda"),
        ("bench-cuda", "benchmarks/serving"),
        ("test-ascend", "hardware/ascend"),
    ):
        named = {word for stage in stages.RUNS[run] for word in stage.tests}
        for file in (ROOT / "tests" / folder).glob("test_*.py"):
            assert str(file.relative_to(ROOT)) in named


@pytest.mark.parametrize("run", ["test-cuda", "bench-cuda"])
def test_stage_selections_name_existing_tests(run: str) -> None:
    """A word of a ``-k`` expression that no test has selects nothing, or deselects nothing."""
    suites = [path.read_text() for path in (ROOT / "mooncake_hal" / "testing").glob("*.py")]
    for stage in stages.RUNS[run]:
        if "-k" not in stage.tests:
            continue
        files = [(ROOT / word).read_text() for word in stage.tests if word.endswith(".py")]
        text = "\n".join([*files, *suites])
        selection = stage.tests[stage.tests.index("-k") + 1].replace("{backend}", "")
        for word in set(re.findall(r"\w+", selection)) - {"and", "or", "not"}:
            assert re.search(rf'def test_\w*{word}|"{word}"', text), f"{stage.name}: {word}"


def test_benchmark_stages_are_judged_by_their_metrics() -> None:
    for run in stages.RUNS.values():
        for stage in run:
            assert stage.measures == any("tests/benchmarks/" in word for word in stage.tests)


def test_sanitizer_checks_our_kernels_and_every_allocation() -> None:
    sanitized = [stage for stage in stages.RUNS["test-cuda"] if stage.through]
    assert [stage.name for stage in sanitized] == ["memcheck", "racecheck", "synccheck"]
    door = (ROOT / "ci" / "test-cuda").read_text()
    for stage in sanitized:
        assert len(stage.environment) == 2
        for name, value in stage.environment.items():
            assert f"{name}={value}" in door


def test_without_a_device_nothing_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("not run: there is an NPU")
    assert stages.main(["test-ascend"]) == 77
    assert "skipped: no ascend device" in capsys.readouterr().out


def test_unavailable_backend_is_reported_before_any_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert stages.main(["test-cuda", "--backend", "none-such", "--out", str(out)]) == 1
    assert "nothing was run: failed: nothing was tested: " in capsys.readouterr().out
    assert not out.exists()


def test_host_is_inspected() -> None:
    machine = stages.detect_machine("cpu", os.environ)
    assert len(machine.devices) >= 1
    assert int(machine.devices[0]["total_bytes"]) > 0
    assert "torch " in machine.description


def run_of(
    tmp_path: Path, content: str, plugin: str = "", **options: object
) -> tuple[bool | None, str]:
    """Run a stage of this test file with only this pytest plugin; returns whether it passed, and
    its summary."""
    test = tmp_path / "test_it.py"
    test.write_text(content)
    tests = (str(test), "-p", "no:cacheprovider", *(("-p", plugin) if plugin else ()))
    stage = stages.Stage("it", "something", tests, **options)
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "tests")}
    passed = stages.StageRunner(MACHINE, tmp_path / "out", os.environ | own).run(stage)
    return passed, (tmp_path / "out" / "summary.md").read_text()


def test_stages_run_concurrently_except_exclusive_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two wait for each other; benchmark and memory stages run after them, one by one."""
    met, order = threading.Barrier(2, timeout=30), []
    runner = stages.StageRunner(MACHINE, tmp_path / "out", os.environ)

    def run(stage: stages.Stage) -> bool:
        if not (stage.measures or stage.is_alone):
            met.wait()
        order.append(stage.name)
        return stage.name != "fails"

    monkeypatch.setattr(runner, "run", run)
    made = [
        stages.Stage("figures", "", (), measures=True),
        stages.Stage("fails", "", ()),
        stages.Stage("memory", "", (), is_alone=True),
        stages.Stage("passes", "", ()),
    ]
    assert runner.run_together(made) == [False, True, True, True]
    assert order[2:] == ["figures", "memory"]


def test_concurrent_stages_share_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage alone gets as many processes as fit the memory; concurrent stages together get no
    more."""
    machine = replace(MACHINE, devices=[{"total_bytes": 16 * stages.BYTES_PER_PROCESS}])
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(stages, "is_there", lambda *_: True)
    runner, counts = stages.StageRunner(machine, tmp_path / "out", os.environ), {}

    def run(stage: stages.Stage) -> bool:
        command = runner._command(stage, 60)
        counts[stage.name] = int(command[command.index("-n") + 1])
        return True

    monkeypatch.setattr(runner, "run", run)
    many = [stages.Stage(name, "", (), processes=12) for name in ("a", "b")]
    runner.run_together([*many, stages.Stage("c", "", (), processes=12, is_alone=True)])
    assert counts == {"a": 8, "b": 8, "c": 12}


def measured(tmp_path: Path, content: str, **options: object) -> tuple[bool | None, str]:
    """As ``run_of``, for a stage that records metrics."""
    return run_of(tmp_path, content, "pytest_benchmark.plugin", measures=True, **options)


def test_passing_and_failing_stage(tmp_path: Path) -> None:
    passed, summary = run_of(tmp_path, PASSING)
    assert passed
    assert "it: passed" in summary
    assert "1 passed" in summary
    assert (tmp_path / "out" / "it.xml").exists()
    passed, summary = run_of(tmp_path, "def test_a(): assert False\n")
    assert passed is False
    assert "it: failed, status 1" in summary


def test_stage_without_executed_tests_fails(tmp_path: Path) -> None:
    skips = "import pytest\n@pytest.mark.parametrize('n', range(3))\n"
    skips += "def test_a(n): pytest.skip('the driver is too old')\n"
    passed, summary = run_of(tmp_path, skips)
    assert passed is False
    reason = "it: failed, nothing ran: 3 skipped, most of them: the driver is too old"
    assert reason in summary
    passed, summary = run_of(tmp_path, "")
    assert passed is False
    assert "it: failed, nothing ran: no test was selected" in summary


def test_stage_has_environment_and_backend_name(tmp_path: Path) -> None:
    content = "import os\ndef test_a(): assert os.environ['IT'] == 'x'\n"
    passed, _ = run_of(tmp_path, content, environment={"IT": "x"})
    assert passed
    command = stages.StageRunner(MACHINE, tmp_path, {})._command(stages.RUNS["test-cuda"][1], 9)
    assert "cpu and (peak_memory or too_much_memory)" in command


def test_interrupted_stage_reports_remaining_tests(tmp_path: Path) -> None:
    content = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\ndef test_c(): pass\n"
    passed, summary = run_of(tmp_path, content, seconds=5)
    assert passed is False
    assert "stopped after 5 s" in summary
    assert stages.progress("....  [ 40/100]\n.. [ 42/100]") == ("42 of 100 tests ended, 58 remain")


def test_metrics_are_reported_and_judged_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed, summary = measured(tmp_path, FIGURES.format(values="1.5, 2.5"))
    assert passed
    assert "  figure 1.5 " in capsys.readouterr().out
    passed, summary = measured(tmp_path, FIGURES.format(values="1.5, 0.5"))
    assert passed is False
    assert "it: failed, " in summary
    assert "1 of 2 figures missed: figure 0.5" in summary
    table = tmp_path / "out" / "it.md"
    assert f"the table is in {table}" in capsys.readouterr().out
    head, _, rows = table.read_text().partition("\n\n")
    assert head == "one x"
    assert rows.splitlines()[2:] == [
        "| figure 1.5 | 1.5 times | ≥ 1 | of mine |",
        "| figure 0.5 | 0.5 times | ≥ 1 | **missed**; of mine |",
    ]


def test_interrupted_stage_keeps_its_metrics(tmp_path: Path) -> None:
    content = (
        FIGURES.format(values="0.5")
        + "def test_b(benchmark):\n    import time\n    time.sleep(60)\n"
    )
    passed, summary = measured(tmp_path, content, seconds=15)
    assert passed is False
    assert "stopped after 15 s" in summary
    assert "1 of 1 figures missed" in summary
    assert "| figure 0.5 |" in (tmp_path / "out" / "it.md").read_text()


def test_benchmark_stage_without_metrics_fails(tmp_path: Path) -> None:
    passed, summary = measured(tmp_path, "def test_a(benchmark): benchmark(int)\n")
    assert passed is False
    assert "it: failed, no figure was measured" in summary


def test_metric_without_bound_is_shown() -> None:
    figure = Figure("f", 4321.0, None, "tokens/s", context="c")
    assert figure.holds
    assert stages.as_markdown([figure]).splitlines()[2] == "| f | 4321 tokens/s |  | c |"


@pytest.mark.parametrize(
    ("gib", "processes", "cores", "wanted"), [(80, 12, 16, 12), (24, 12, 16, 4), (80, 12, 3, 3)]
)
def test_processes_share_cores_and_device_memory(
    gib: int, processes: int, cores: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    machine = replace(MACHINE, devices=[{"total_bytes": gib << 30}])
    assert machine.num_processes(stages.Stage("it", "", (), processes=processes)) == wanted


def test_stage_uses_processes_if_xdist_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    passed, _ = run_of(tmp_path, PASSING + "def test_b(): pass\n", "xdist.plugin", processes=2)
    assert passed
    assert "bringing up nodes" in (tmp_path / "out" / "it.log").read_text()
    monkeypatch.setattr(stages, "is_there", lambda name, environment: False)
    passed, _ = run_of(tmp_path, PASSING, processes=2)
    assert passed
    assert "bringing up nodes" not in (tmp_path / "out" / "it.log").read_text()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"needs": "no_such_library"}, "no_such_library is not installed"),
        ({"devices": 2}, "it needs 2 devices, found 1"),
    ],
)
def test_missing_requirement_is_one_line(
    tmp_path: Path, options: dict[str, object], reason: str
) -> None:
    passed, summary = run_of(tmp_path, "", **options)
    assert passed is None
    assert f"it: not run: {reason}" in summary


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [((True, None), 0), ((True, False), 1), ((None, None), 1), ((None, False), 1)],
)
def test_stages_not_run_prevent_success(
    tmp_path: Path, verdicts: tuple[bool | None, ...], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(verdicts)
    monkeypatch.setattr(stages, "detect_machine", lambda backend, environment: MACHINE)
    monkeypatch.setattr(stages.StageRunner, "run", lambda self, stage: left.pop(0))
    argv = ["test-cuda", "--backend", "cpu", "--out", str(tmp_path)]
    assert stages.main([*argv, "--stage", "pairs", "--stage", "engine"]) == wanted


@pytest.mark.skipif(sys.version_info < (3, 11), reason="not run: tomllib is Python 3.11's")
def test_project_is_found_without_installation(tmp_path: Path) -> None:
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
    # -S: ignores the packages installed here
    argv = [sys.executable, "-S", "-c", code]
    found = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    points, version, value = json.loads(found.stdout)
    assert {"cpu", "cuda", "ascend"} <= set(points)
    assert version
    assert value == 7
    assert stages.is_there("carried", environment)
    assert not stages.is_there("carried", {})
    assert not stages.is_there("no-such-program", environment)  # and no module has that name
    assert not (tmp_path / "out" / "host" / "site" / "pytest.py").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="not run: tomllib is Python 3.11's")
def test_packages_on_the_inherited_path_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as present, so their wheels are not unpacked."""
    monkeypatch.setenv("PYTHONPATH", "/opt/site-a:/opt/site-b")
    environment = stages.host_environment(tmp_path, None)
    assert environment["PYTHONPATH"].split(os.pathsep)[-2:] == ["/opt/site-a", "/opt/site-b"]
