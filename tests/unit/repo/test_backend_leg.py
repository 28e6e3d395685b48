"""A hardware leg is green only if tests ran on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.deploy import load_script

leg = load_script("test_backend")


@pytest.mark.parametrize(
    ("tests", "skipped", "wanted"), [(10, 3, 0), (10, 10, 1), (0, 0, 1), (1, 0, 0)]
)
def test_report_with_only_skips_is_a_failure(
    tmp_path: Path, tests: int, skipped: int, wanted: int
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        f'<testsuites><testsuite name="x" tests="{tests}" skipped="{skipped}"/></testsuites>'
    )
    assert leg.verdict(report) == wanted


def test_unavailable_backend_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert leg.main(["ascend-that-is-not-there"]) == 1
    assert capsys.readouterr().out.startswith("failed: nothing was tested: ")


def test_other_generation_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert leg.main(["null", "--generation", "A3"]) == 77
    assert capsys.readouterr().out == "skipped: no null A3, found null\n"
