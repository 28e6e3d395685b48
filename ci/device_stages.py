"""Runs an accelerator's tests and benchmarks in stages, each with a time limit of its own.

python ci/device_stages.py test-cuda --list
python ci/device_stages.py test-cuda --host --stage conformance --stage kernels --limit 300
python ci/device_stages.py test-cuda --host --together   # with many cores and little time
python ci/device_stages.py bench-cuda --host --wheels wheels
python ci/device_stages.py bench-cuda --backend cpu --shape tiny --stage alone   # without a GPU

With --host everything runs from source under this interpreter, with its own torch, Triton and
transformers: nothing is installed or replaced, and there is no virtual environment. Missing
packages come from the wheels in --wheels (ci/wheels-offline downloads them on another machine),
which are unpacked into a separate folder. Figures are printed and checked as they are recorded.
Each stage's log, JUnit file, verdict and table of figures are written to --out when the stage ends.

Exits 0 if all stages that ran passed, and 77 if there is no such device. Exits 1 if the backend
can't use the device, if a stage failed, missed a bound, timed out or executed no test, or if this
machine lacks what all stages need.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from host_environment import ROOT, host_environment, is_there
from junit_report import read_counts
from stage_list import RUNS, Stage

sys.path.insert(0, str(ROOT / "tests"))

from support.figures import (  # tests/ is not installed
    FIGURES_FILE,
    Figure,
    as_markdown,
    read_figures,
)

SKIPPED = 77
DEVICE_FILES = {"cuda": "nvidia[0-9]*", "ascend": "davinci[0-9]*"}
BYTES_PER_PROCESS = 5 << 30
"""Device memory per test process: a context, compiled kernels, a test's buffers."""
MOST_TEST_SECONDS = 300
LOOK_SECONDS = 180
_PROGRESS = re.compile(r"\[ *(\d+)/(\d+)\]")


@dataclass(frozen=True)
class Machine:
    """The backend and devices that stages run on.

    Args:
        backend: name of the backend.
        devices: the devices that the backend reports, as fields of ``DeviceInfo``.
        description: one line for the heading of a table.
    """

    backend: str
    devices: Sequence[Mapping[str, str | int]]
    description: str

    @property
    def max_processes(self) -> int:
        """Number of test processes that fit into the first device's memory."""
        return max(1, int(self.devices[0]["total_bytes"]) // BYTES_PER_PROCESS)

    def num_processes(self, stage: Stage, wanted: int = 0) -> int:
        """Number of processes that run a stage's tests on the first device at the same time.

        Args:
            stage: the stage.
            wanted: processes that it and concurrent stages want in total; 0 if it runs alone.
        """
        share = self.max_processes * stage.processes // max(wanted, stage.processes)
        return max(1, min(stage.processes, os.cpu_count() or 1, share))


class Unusable(Exception):
    """The backend can't use this machine; the message has the reason."""


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    stages = RUNS[args.run]
    if unknown := set(args.stage) - {stage.name for stage in stages}:
        parser.error(f"no stage {', '.join(sorted(unknown))}; --list shows them")
    if args.list:
        for stage in stages:
            print(f"{stage.name:<12} {stage.seconds} s  {stage.what}")
        return 0
    backend = args.backend or args.run.rpartition("-")[2]
    files = DEVICE_FILES.get(backend)
    if files and not list(Path("/dev").glob(files)):
        print(f"skipped: no {backend} device (/dev/{files})")
        return SKIPPED
    environment = os.environ | {"MOONCAKE_HAL_BACKEND": backend}
    environment |= {"MOONCAKE_SOAK_STEPS": args.soak_steps} if args.soak_steps else {}
    environment |= {"MOONCAKE_SERVING_SHAPE": args.shape} if args.shape else {}
    if args.host:
        environment |= host_environment(args.out, args.wheels)
    try:
        machine = detect_machine(backend, environment)
    except Unusable as exc:
        print(f"nothing was run: {exc}")
        return 1
    print(machine.description, flush=True)
    runner = StageRunner(machine, args.out, environment, args.limit)
    chosen = [stage for stage in stages if not args.stage or stage.name in args.stage]
    verdicts = runner.run_together(chosen) if args.together else list(map(runner.run, chosen))
    return 1 if False in verdicts or True not in verdicts else 0


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--list", action="store_true", help="print the stages")
    parser.add_argument("--stage", action="append", default=[], help="run this stage; repeatable")
    parser.add_argument("--limit", type=int, help="time limit of each stage in seconds")
    parser.add_argument(
        "--together", action="store_true", help="run stages concurrently, except those that measure"
    )
    parser.add_argument("--host", action="store_true", help="use this interpreter's packages")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of missing packages")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "stages")
    parser.add_argument("--backend", help="run the stages on another backend")
    parser.add_argument("--shape", help="shape of the served model: llama3-8b, tiny")
    parser.add_argument("--soak-steps", metavar="N", help="steps of stage soak (default: 120000)")
    return parser


def detect_machine(backend: str, environment: Mapping[str, str]) -> Machine:
    """The devices that the backend finds on this machine, probed in a separate process.

    Raises:
        Unusable: the backend can't be used.
    """
    program = str(ROOT / "ci" / "test_backend.py")
    last, status = _said_last([program, backend, "--devices"], environment)
    if status:
        raise Unusable(f"{last or f'status {status}'} ({versions()})")
    devices = json.loads(last)
    if backend == "cuda":
        last, status = _said_last([str(ROOT / "ci" / "cuda_facts.py")], environment)
        if status:
            raise Unusable(last)
        return Machine(backend, devices, f"{last}; {versions()}")
    names = f"{len(devices)} x {devices[0]['name']} ({devices[0]['generation']})"
    return Machine(backend, devices, f"{names}; {versions()}")


def _said_last(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[str, int]:
    """Run a Python program; returns its last line of output and its exit status."""
    command = [sys.executable, *argv]
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=LOOK_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{' '.join(argv)} did not end within {LOOK_SECONDS} s", 1
    lines = (done.stdout if done.stdout.strip() else done.stderr).strip().splitlines()
    return lines[-1] if lines else "", done.returncode


def versions() -> str:
    """The versions of Python and libraries that the stages run with, on one line."""
    names = ("torch", "triton", "torch-npu", "transformers", "numpy")
    found = [f"Python {sys.version.split()[0]} ({sys.executable})"]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


@dataclass
class Ending:
    """How a stage's process ended.

    Args:
        status: its exit status; None if it was stopped at its time limit.
        seconds: run time, or the time limit.
        figures: the figures that it recorded.
    """

    status: int | None
    seconds: float
    figures: Sequence[Figure] = field(default_factory=tuple)


class StageRunner:
    """Runs stages; prints each verdict and appends it to the summary.

    Args:
        machine: the machine.
        out: folder for the summary and each stage's log, JUnit file, figures and table.
        environment: environment variables of all stages.
        limit: time limit of each stage in seconds, in place of the stage's own.
    """

    def __init__(
        self, machine: Machine, out: Path, environment: Mapping[str, str], limit: int | None = None
    ) -> None:
        self._machine = machine
        self._out = out
        self._environment = environment
        self._limit = limit
        self._wanted = 0  # processes that concurrent stages want in total
        out.mkdir(parents=True, exist_ok=True)

    def run(self, stage: Stage) -> bool | None:
        """Run one stage; returns whether it passed, None if this machine lacks what it needs."""
        if reason := self._lacks(stage):
            self._say(f"{stage.name}: not run: {reason}")
            return None
        for ending in ("xml", "log", "figures", "md"):  # left by an earlier run
            (self._out / f"{stage.name}.{ending}").unlink(missing_ok=True)
        ended = self._execute(stage)
        passed, words = self._verdict(stage, ended)
        self._say(f"{stage.name}: {words}")
        if ended.figures:
            table = self._out / f"{stage.name}.md"
            table.write_text(f"{self._machine.description}\n\n{as_markdown(ended.figures)}")
            print(f"the table is in {table}", flush=True)
        return passed

    def run_together(self, stages: Sequence[Stage]) -> list[bool | None]:
        """Run stages concurrently, then those that need the device exclusively, one by one."""
        shared = [stage for stage in stages if not (stage.measures or stage.is_alone)]
        rest = [stage for stage in stages if stage not in shared]
        self._wanted = sum(stage.processes for stage in shared if not self._lacks(stage))
        with ThreadPoolExecutor(max(1, min(len(shared), self._machine.max_processes))) as pool:
            verdicts = list(pool.map(self.run, shared))
        self._wanted = 0
        return [*verdicts, *map(self.run, rest)]

    def _lacks(self, stage: Stage) -> str:
        """What a stage needs and this machine lacks; empty if nothing."""
        if stage.needs and not is_there(stage.needs, self._environment):
            return f"{stage.needs} is not installed"
        if stage.devices > len(self._machine.devices):
            return f"it needs {stage.devices} devices, found {len(self._machine.devices)}"
        return ""

    def _command(self, stage: Stage, seconds: int) -> list[str]:
        report = self._out / f"{stage.name}.xml"
        options = ["-q", "-rs", "-o", "console_output_style=count", f"--junit-xml={report}"]
        options += ["-o", f"timeout={min(seconds, MOST_TEST_SECONDS)}"]
        if stage.measures:
            options += ["--benchmark-only", "--benchmark-quiet"]
        processes = self._machine.num_processes(stage, self._wanted)
        if processes > 1 and is_there("xdist", self._environment):
            options += ["-n", str(processes), "--dist", stage.dist]
        tests = [word.replace("{backend}", self._machine.backend) for word in stage.tests]
        return [*stage.through, sys.executable, "-m", "pytest", *options, *tests]

    def _execute(self, stage: Stage) -> Ending:
        """Run a stage's tests, and print its figures as they are recorded."""
        seconds = self._limit or stage.seconds
        recorded, log = (self._out / f"{stage.name}.{ending}" for ending in ("figures", "log"))
        own = {FIGURES_FILE: str(recorded), "PYTHONUNBUFFERED": "1"}  # the log is followed live
        environment = {**self._environment, **stage.environment, **own}
        command, began, num_printed = self._command(stage, seconds), time.monotonic(), 0
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        status: int | None = None
        while status is None and time.monotonic() - began < seconds:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(1.0)
            figures = read_figures(recorded)
            for figure in figures[num_printed:]:
                print(f"  {figure}", flush=True)
            num_printed = len(figures)
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Ending(None, seconds, figures)
        return Ending(status, time.monotonic() - began, figures)

    def _verdict(self, stage: Stage, ended: Ending) -> tuple[bool, str]:
        """Whether a stage passed, and the verdict as text."""
        log = (self._out / f"{stage.name}.log").read_text()
        missed = [figure.name for figure in ended.figures if not figure.holds]
        words = f"; {len(missed)} of {len(ended.figures)} figures missed" if ended.figures else ""
        if ended.status is None:
            return False, f"stopped after {ended.seconds:.0f} s, {progress(log)}{words}"
        counts = read_counts(self._out / f"{stage.name}.xml")
        last = (log.rstrip().splitlines() or ["no output"])[-1].strip("= ")
        words = f"{ended.seconds:.0f} s: {last}{words}"
        if ended.status in (0, 5) and not counts.ran:  # 5: pytest collected no tests
            return False, f"failed, {counts.why_nothing_ran}"
        if ended.status:
            return False, f"failed, status {ended.status}, {words}"
        if missed:
            return False, f"failed, {words}: {', '.join(missed)}"
        if stage.measures and not ended.figures:
            return False, f"failed, no figure was measured, {words}"
        return True, f"passed, {words}"

    def _say(self, words: str) -> None:
        print(words, flush=True)
        with (self._out / "summary.md").open("a") as summary:
            summary.write(f"* {words}\n")


def progress(log: str) -> str:
    """How many tests had ended, by pytest's log."""
    found = _PROGRESS.findall(log)
    if not found:
        return "before the first test ended"
    done, total = map(int, found[-1])
    return f"{done} of {total} tests ended, {total - done} remain"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
