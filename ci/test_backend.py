"""Runs all tests of one hardware backend, and fails if none ran on a device.

python ci/test_backend.py cuda
python ci/test_backend.py ascend --generation A2 -- -x
python ci/test_backend.py cuda --devices     # only prints the devices

Exits 0 if tests ran on the device and passed, and 77 if there is no device of that generation.
Exits 1 if tests failed, if the backend can't use the device, or if no test ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from junit_report import read_counts

from mooncake_hal.errors import HalError
from mooncake_hal.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    at = argv.index("--") if "--" in argv else len(argv)
    own, for_pytest = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--generation", help="skip unless a device has it")
    parser.add_argument("--devices", action="store_true", help="print devices as JSON, no tests")
    args = parser.parse_args(own)
    try:
        devices = Registry.discover().select_backend(args.backend).runtime.devices()
    except HalError as exc:
        print(f"failed: nothing was tested: {exc}")
        return 1
    if args.devices:
        print(json.dumps([asdict(device) for device in devices]))
        return 0
    found = sorted({device.generation for device in devices})
    if args.generation and args.generation not in found:
        print(f"skipped: no {args.backend} {args.generation}, found {', '.join(found)}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        status = run_tests(args.backend, report, for_pytest)
        return status or verdict(report)


def run_tests(backend: str, report: Path, for_pytest: Sequence[str]) -> int:
    """Run the conformance suite and the hardware tests of one backend; returns pytest's status."""
    folders = ["tests/conformance/test_backends.py"]
    own = ROOT / "tests" / "hardware" / backend
    if own.is_dir():
        folders.append(str(own.relative_to(ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", *folders, "-k", backend]
    command += [f"--junit-xml={report}", *for_pytest]
    environment = os.environ | {"MOONCAKE_HAL_BACKEND": backend}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def verdict(report: Path) -> int:
    """0 if a test was executed; a report with only skipped tests is a failure."""
    counts = read_counts(report)
    print(f"{counts.ran} tests ran on the device")
    return 0 if counts.ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
