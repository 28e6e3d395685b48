"""Tests and figures of an accelerator in stages, each of which ends by itself.

python ci/device_stages.py test-cuda --list
python ci/device_stages.py test-cuda --host --stage conformance --stage kernels --limit 300
python ci/device_stages.py bench-cuda --host --wheels wheels

With --host everything runs under this interpreter, from source, with the torch, Triton and
transformers that it has: nothing is installed or replaced, there is no virtual environment. What it
lacks comes from the wheels in --wheels (ci/wheels-offline fetches them elsewhere), unpacked into a
folder of their own. Log, JUnit file and verdict of a stage are in --out as soon as it has ended.

Status 0: every stage passed. 77: no such device. 1: a stage failed, was stopped, or ran nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 540
SKIPPED = 77
_SOURCES = (".", "api", "backends/cpu", "backends/cuda", "backends/ascend", "kv", "conductor")
_SOURCES += ("engine", "proxy", "tests")
_PROJECTS = (".", "api", "backends/cuda", "backends/ascend", "kv", "conductor", "engine", "proxy")
_PROGRESS = re.compile(r"\[ *(\d+)/(\d+)\]")
_SANITIZED = ("tests/hardware/cuda/test_kernels.py",)


@dataclass(frozen=True)
class Stage:
    """A part of a run.

    Args:
        name: as it is asked for.
        what: it shows.
        tests: arguments of pytest.
        seconds: after which it is stopped.
        needs: a module or a program; without it the stage is not run.
        through: a command that runs the tests.
    """

    name: str
    what: str
    tests: tuple[str, ...]
    seconds: int = MOST_SECONDS
    needs: str = ""
    through: tuple[str, ...] = ()


def _sanitizer(tool: str) -> Stage:
    through = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
    through += ("--report-api-errors", "no", "--require-cuda-init", "yes")
    what = f"every kernel once, under compute-sanitizer's {tool}"
    return Stage(tool, what, _SANITIZED, needs="compute-sanitizer", through=through)


_SUITE = "tests/conformance/test_backends.py"
_CUDA, _BENCH = "tests/hardware/cuda", "tests/benchmarks/cuda"
RUNS: Mapping[str, tuple[Stage, ...]] = {
    "test-cuda": (
        Stage("conformance", "every op beside the reference", (_SUITE, "-k", "cuda")),
        Stage("kernels", "kernels, libraries, selection", tuple(
            f"{_CUDA}/test_{name}.py" for name in ("kernels", "libraries", "selection")
        )),
        Stage("engine", "captured decodes and pieces, the CPU's tokens", tuple(
            f"{_CUDA}/test_{name}.py" for name in ("decode_step", "engine_step", "piecewise_graphs")
        )),
        Stage("pairs", "prefill and decode apart", (f"{_CUDA}/test_pd.py",)),
        Stage("transports", "cuda_ipc and staged", (f"{_CUDA}/test_transport.py",)),
        Stage("ranks", "small all-reduces of two GPUs", (f"{_CUDA}/test_small_all_reduces.py",)),
        _sanitizer("memcheck"),
        _sanitizer("racecheck"),
        _sanitizer("synccheck"),
    ),
    "bench-cuda": (
        Stage("decode", "decode attention beside a copy", (
            f"{_BENCH}/test_kernels.py", "-k", "decode_attention"
        )),
        Stage("flashinfer", "decode attention beside FlashInfer", (
            f"{_BENCH}/test_kernels.py", "-k", "flashinfer"
        ), needs="flashinfer"),
        Stage("kernels", "prompts, latents, experts", (
            f"{_BENCH}/test_kernels.py", "-k", "not decode_attention and not flashinfer"
        )),
        Stage("transfer", "KV from GPU to GPU beside a copy", (f"{_BENCH}/test_kv_transfer.py",)),
        Stage("model", "decode steps of an 8 B shape", (f"{_BENCH}/test_engine.py",)),
        Stage("ranks", "small all-reduces beside NCCL's", (f"{_BENCH}/test_all_reduce.py",)),
    ),
    "test-ascend": (
        Stage("conformance", "every op beside the reference", (_SUITE, "-k", "ascend")),
        Stage("pairs", "prefill and decode apart", ("tests/hardware/ascend/test_pd.py",)),
        Stage("transports", "hccs", ("tests/hardware/ascend/test_hccs.py",)),
    ),
}  # fmt: skip
DEVICE_FILES = {"cuda": "nvidia[0-9]*", "ascend": "davinci[0-9]*"}


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--list", action="store_true", help="print the stages")
    parser.add_argument("--stage", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--limit", type=int, help="seconds of each stage, in place of its own")
    parser.add_argument("--host", action="store_true", help="with what this interpreter has")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what it lacks")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "stages")
    args = parser.parse_args(argv)
    stages = RUNS[args.run]
    if unknown := set(args.stage) - {stage.name for stage in stages}:
        parser.error(f"no stage {', '.join(sorted(unknown))}; --list shows them")
    if args.list:
        for stage in stages:
            print(f"{stage.name:<12} {stage.seconds} s  {stage.what}")
        return 0
    backend = args.run.rpartition("-")[2]
    if not list(Path("/dev").glob(DEVICE_FILES[backend])):
        print(f"skipped: no {backend} device (/dev/{DEVICE_FILES[backend]})")
        return SKIPPED
    environment = os.environ | {"MOONCAKE_HAL_BACKEND": backend}
    if args.host:
        environment |= host_environment(args.out, args.wheels)
    print(versions(), flush=True)
    chosen = [stage for stage in stages if not args.stage or stage.name in args.stage]
    verdicts = [run_stage(stage, args.out, environment, args.limit) for stage in chosen]
    return 0 if all(verdicts) else 1


def versions() -> str:
    """What the stages run with, on one line."""
    names = ("torch", "triton", "torch-npu", "transformers", "numpy")
    found = [f"Python {sys.version.split()[0]} ({sys.executable})"]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def run_stage(
    stage: Stage, out: Path, environment: Mapping[str, str], limit: int | None = None
) -> bool:
    """Run a stage; what it came to is printed, and appended to the summary. True if it did not
    fail: one that lacks what it needs is no failure."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if stage.needs and not is_there(stage.needs):
        return _conclude(out, f"{stage.name}: not run: {stage.needs} is not here", passed=True)
    pytest = ("-m", "pytest", "-q", "-rs", "-o", "console_output_style=count", *stage.tests)
    command = [*stage.through, sys.executable, *pytest, f"--junit-xml={out / stage.name}.xml"]
    log, seconds = out / f"{stage.name}.log", limit or stage.seconds
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            words = f"stopped after {seconds} s, {progress(log.read_text())}"
            return _conclude(out, f"{stage.name}: {words}", passed=False)
    lines = log.read_text().rstrip().splitlines() or ["nothing was said"]
    words = f"{stage.name}: {'passed' if status == 0 else f'failed, status {status}'}"
    taken = time.monotonic() - began
    return _conclude(out, f"{words}, {taken:.0f} s: {lines[-1].strip('= ')}", passed=status == 0)


def progress(log: str) -> str:
    """How far pytest had come."""
    found = _PROGRESS.findall(log)
    if not found:
        return "before the first test had ended"
    done, total = map(int, found[-1])
    return f"{done} of {total} tests had ended, {total - done} are left"


def is_there(name: str) -> bool:
    """Whether a module or a program of that name is here."""
    return shutil.which(name) is not None or (
        "-" not in name and importlib.util.find_spec(name) is not None
    )


def _conclude(out: Path, words: str, *, passed: bool) -> bool:
    print(words, flush=True)
    with (out / "summary.md").open("a") as summary:
        summary.write(f"* {words}\n")
    return passed


def host_environment(out: Path, wheels: Path | None) -> dict[str, str]:
    """Variables with which this interpreter finds the project as if it were installed.

    Args:
        out: where what it needs is written.
        wheels: for what this interpreter lacks.
    """
    metadata, site = out / "host" / "metadata", out / "host" / "site"
    for project in _PROJECTS:
        write_metadata(ROOT / project / "pyproject.toml", metadata)
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            unpack_if_missing(wheel, site)
    paths = [metadata, *((ROOT / source).resolve() for source in _SOURCES), site]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "host" / "triton")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # what another torch, transformers or Python warns of is shown, and is no failure
        "PYTEST_ADDOPTS": "-W default -p no:cacheprovider",
    }


def write_metadata(pyproject: Path, target: Path) -> Path:
    """What ``importlib.metadata`` reads of an installed distribution: entry points, version. Python
    3.11 or newer reads the file."""
    import tomllib

    project = tomllib.loads(pyproject.read_text())["project"]
    name, version = project["name"], project["version"]
    info = target / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


def unpack_if_missing(wheel: Path, site: Path) -> bool:
    """Unpack a wheel, unless this interpreter has such a distribution; whether it was unpacked."""
    name = wheel.name.split("-")[0].replace("_", "-")
    try:
        importlib.metadata.version(name)
        return False
    except importlib.metadata.PackageNotFoundError:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
