"""The ``mooncake-hal`` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mooncake_hal import cli
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.registry import PluginStatus, Registry
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(arguments)
    return status, capsys.readouterr().out


def test_devices_prints_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "devices")
    assert status == 0
    for title in ("Backends", "Devices", "Transports"):
        assert title in text.splitlines()
    assert "GiB" in text


def test_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "devices", "--json")
    found = json.loads(text)
    assert status == 0
    assert {row["name"] for row in found["backends"]} >= {"cpu", "null"}
    cpu = next(row for row in found["devices"] if row["backend"] == "cpu")
    assert cpu["generation"]
    assert cpu["total_bytes"] > 0
    for row in found["backends"]:
        assert row["status"] == "available" or row["reason"], row


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--pieces", "4096,abc"], "wanted sizes of 1 byte or more such as 4096,64KiB, got '4096,"),
        (["--pieces", "0"], "wanted sizes of 1 byte or more such as 4096,64KiB, got '0'"),
        (["--size", "0"], "must be a number, at least 1, got '0'"),
        (["--rounds", "0"], "must be a number, at least 1, got '0'"),
        (["--connections", "-1"], "must be a number, at least 1, got '-1'"),
        (["--json", "/missing/a"], "can't write /missing/a: there is no folder /missing"),
    ],
)
def test_bench_rejects_what_it_can_not_measure(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "transfer", *wrong])
    assert f"bench transfer: error: argument {wrong[0]}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RuntimeError("driver says 507015"), PluginStatus.BROKEN),
        (BackendUnavailable("odd", "driver says 507015"), PluginStatus.UNAVAILABLE),
    ],
)
def test_backend_that_fails_to_load_is_a_row(failure: Exception, status: PluginStatus) -> None:
    def load() -> Any:
        raise failure

    spec = BackendSpec("odd", API_VERSION, 90, lambda: Availability(True), load)
    found = cli.describe(Registry(backends={"odd": (spec, "odd.plugin")}))
    (row,) = found["backends"]
    assert row["status"] == status.value
    assert "driver says 507015" in str(row["reason"])
    assert found["devices"] == []


def test_table_has_a_reason_for_every_unavailable_backend() -> None:
    row = {"name": "fast", "status": "unavailable", "priority": 90, "reason": "no driver"}
    empty: list[dict[str, Any]] = []
    found = {"backends": [row], "devices": empty, "transports": empty, "not_loaded": empty}
    assert cli.format_tables(found) == (
        "Backends\n  name  status       priority  reason\n  fast  unavailable  90        no driver"
    )


def test_unknown_arguments_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["devices", "--jsno"])
    assert "unrecognized arguments: --jsno" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("cpu", "--backend auto: cpu"),
        ("foo", "--backend auto: none: MOONCAKE_HAL_BACKEND=foo is not installed"),
    ],
)
def test_devices_prints_the_backend_that_auto_selects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, message: str
) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", variable)
    _, text = run(capsys, "devices")
    assert text.splitlines()[-1] == message


def test_invalid_environment_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_BLOCK", "No Name")
    assert cli.main(["devices"]) == 1
    assert capsys.readouterr().err.startswith("mooncake-hal: MOONCAKE_HAL_BLOCK: 'No Name'")


def test_the_transfer_benchmark_declares_its_own_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "transfer", "--help"])
    assert caught.value.code == 0
    assert "--transports" in capsys.readouterr().out


def test_closed_stdout_prints_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "mooncake_hal", "devices"],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_collect_env_prints_the_machine_and_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "collect-env")
    assert status == 0
    for title in ("## System", "## Packages", "## RDMA", "## Hardware layer", "Transports"):
        assert title in text.splitlines()
    status, text = run(capsys, "collect-env", "--json")
    assert status == 0
    assert json.loads(text).keys() > {"System", "Environment", "backends", "transports"}
