"""The example of docs/hardware.md is installed, listed, serves, and passes the conformance
suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.emulated_devices import MYCHIP as EXAMPLE, install_example
from support.programs import TINY_LLAMA

PROMPT = "A language model answers in two"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with the example installed: its folder, and the metadata that pip would
    write."""
    install_example(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(EXAMPLE)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], program: str, *arguments: str) -> str:
    """Standard output of a program installed beside this Python, which must exit with 0."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def generate(environment: dict[str, str], backend: str) -> str:
    """The tiny model's answer on that backend."""
    sizes = ["--threads", "1", "--num-kv-blocks", "64", "--max-tokens", "24"]
    model = ["--backend", backend, "--model", str(TINY_LLAMA)]
    return run(environment, "mooncake-engine", "generate", *sizes, *model, PROMPT)


def test_example_is_listed(environment: dict[str, str]) -> None:
    rows = [
        line.split(None, 3) for line in run(environment, "mooncake-hal", "devices").splitlines()
    ]
    assert ["mychip", "available", "-1", "one device that is the host"] in rows


def test_example_serves_same_text_as_cpu_backend(environment: dict[str, str]) -> None:
    assert generate(environment, "mychip") == generate(environment, "cpu")


@pytest.mark.timeout(240)
def test_example_passes_conformance_suite(environment: dict[str, str]) -> None:
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    output = run(environment, "pytest", *options, str(EXAMPLE / "tests"))
    passed = int(output.split(" passed")[0].split()[-1])
    assert passed > 220, output


def test_example_has_at_most_400_lines() -> None:
    """Backend, its own memory, plugin, packaging and tests."""
    written = [*EXAMPLE.rglob("*.py"), EXAMPLE / "pyproject.toml"]
    assert len(written) >= 5
    assert sum(len(path.read_text().splitlines()) for path in written) <= 400
