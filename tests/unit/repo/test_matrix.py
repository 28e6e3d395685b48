"""The workflow and the scripts agree, and a leg without hardware is never green."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from support.deploy import ROOT, load_script, read_yaml

matrix = load_script("matrix")
LEGS = matrix.read_legs()
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
_EXPRESSION = re.compile(r"\$\{\{ matrix\.(\w+) \}\}")


def jobs() -> dict[str, dict[str, Any]]:
    """Every job that the workflow runs, its matrix spelt out."""
    [workflow] = read_yaml(WORKFLOW)
    found = {}
    for name, job in workflow["jobs"].items():
        axes = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            found[_fill(job.get("name", name), chosen)] = job | {"chosen": chosen}
    return found


def _fill(text: str, chosen: dict[str, str]) -> str:
    return _EXPRESSION.sub(lambda match: chosen[match[1]], text)


JOBS = jobs()


def test_workflow_has_all_legs_of_matrix() -> None:
    assert set(JOBS) == set(LEGS)


@pytest.mark.parametrize("name", LEGS)
def test_job_runs_commands_of_its_leg(name: str) -> None:
    job = JOBS[name]
    runs = [_fill(step["run"], job["chosen"]) for step in job["steps"] if "run" in step]
    assert tuple(runs) == LEGS[name].commands
    labels = job["runs-on"] if isinstance(job["runs-on"], list) else [job["runs-on"]]
    assert LEGS[name].runner in labels
    assert not any(step.get("continue-on-error") for step in job["steps"])
    assert not job.get("continue-on-error")


@pytest.mark.parametrize("name", LEGS)
def test_scripts_of_legs_exist(name: str) -> None:
    for command in LEGS[name].commands:
        script = ROOT / command.split()[0]
        assert script.is_file(), script
        assert script.stat().st_mode & 0o111, f"{script} is not executable"


def test_python_versions_are_those_of_the_packages() -> None:
    versions = sorted(name.removeprefix("cpu-") for name in LEGS if name.startswith("cpu-"))
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


def test_only_legs_with_own_machines_wait_for_a_variable() -> None:
    gated = {name for name, job in JOBS.items() if "if" in job}
    assert gated == {name for name in LEGS if "self-hosted" in JOBS[name]["runs-on"]}
    assert gated == {"cuda", "ascend-a2", "ascend-a3"}


@pytest.mark.parametrize(
    ("statuses", "wanted"),
    [((0, 0), 0), ((0, 77), 77), ((77, 77), 77), ((0, 1), 1), ((77, 1), 1), ((5,), 1)],
)
def test_status_of_several_legs(statuses: tuple[int, ...], wanted: int) -> None:
    leg = matrix.Leg("x", "r", ("true",))
    outcomes = [matrix.Outcome(leg, status, "words", 1.0) for status in statuses]
    status, lines = matrix.summary(outcomes)
    assert status == wanted
    words = {0: "ok", 77: "skipped"}
    assert [line.split()[0] for line in lines] == [words.get(s, "FAILED") for s in statuses]


def test_leg_stops_at_first_failing_command() -> None:
    leg = matrix.Leg("x", "r", ("echo one", "echo 'skipped: no x'; exit 77", "echo never"))
    outcome = matrix.run_leg(leg)
    assert (outcome.status, outcome.last_line) == (77, "skipped: no x")
