"""Runs our programs as a user would, and makes sure that none outlives the test."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mooncake_engine.process.child_processes import die_with_parent

REPOSITORY = Path(__file__).parents[2]
TINY_LLAMA = REPOSITORY / "examples" / "tiny-llama"
READY_S = 90.0
END_S = 60.0


class Program:
    """A running program whose output is read line by line.

    Args:
        argv: module and arguments.
        log: the file for standard error; without one, ``errors`` gets its lines.
        environment: variables in addition to those of this process.
        through: a command that runs it, for example in another network namespace.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
    ) -> None:
        with nullcontext(subprocess.PIPE) if log is None else log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*through, sys.executable, "-m", *argv],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # a killed test run closes nothing
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._readers = [threading.Thread(target=self._read_output)]
        if log is None:
            self._readers.append(threading.Thread(target=self._read_errors))
        for reader in self._readers:
            reader.start()

    def wait_for(self, words: str, timeout_s: float = READY_S) -> str:
        """Wait for the next line of standard output that contains these words; returns it."""
        while True:
            try:
                line = self._queue.get(timeout=timeout_s)
            except queue.Empty:
                said = "".join(self.errors)
                raise AssertionError(f"no {words!r} within {timeout_s:g} s: {said}") from None
            if line is None:
                raise AssertionError(f"exited without {words!r}: {''.join(self.errors)}")
            if words in line:
                return line.strip()

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = END_S) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = END_S) -> int:
        """Wait for the program to exit and for its whole output; returns the exit status."""
        status = self.process.wait(timeout_s)
        self.close()
        return status

    def close(self) -> None:
        """Kill the remaining processes of its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def error_text(self) -> str:
        """Standard error so far."""
        return "".join(self.errors)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(iter(self.process.stderr.readline, ""))


def descendants(pid: int) -> dict[int, str]:
    """All descendants of a process: process ids and command lines."""
    found = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found |= {int(child): command} | descendants(int(child))
    return found


def ranks_of(program: Program) -> list[int]:
    """The processes of an instance's ranks, in order."""
    found = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(program.process.pid)}
    ranks = [pid for pid, name in found.items() if name.startswith("mooncake-rank")]
    return sorted(ranks, key=lambda pid: int(found[pid].removeprefix("mooncake-rank")))


def imported_by(*argv: str) -> set[str]:
    """The modules that Python imports when run with these arguments."""
    command = [sys.executable, "-X", "importtime", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    lines = done.stderr.splitlines()
    return {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("import time:")}


def is_running(pid: int) -> bool:
    """Whether this process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextmanager
def running(*argv: str, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """A program that is stopped at the end of the block."""
    program = Program(argv, environment=environment)
    try:
        yield program
    finally:
        program.close()


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, Program]]:
    """An instance that serves the tiny Llama on a free port: its URL and its process."""
    argv = ["serve", "--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "512"]
    with running("mooncake_engine.cli", *argv, "--threads", "1", *options) as program:
        yield program.wait_for("ready ").split()[1], program
