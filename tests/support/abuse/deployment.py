"""The attacked deployment: two instances of each role and a proxy with two workers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.abuse.attack import Target
from support.abuse.verdicts import MIB
from support.programs import TINY_LLAMA, Program, descendants, is_running

CONNECTORS = {"pull": "MooncakeConnector", "push": "MooncakeLayerwiseConnector"}
PER_ROLE = 2
WORKERS = 2
START_S = 300.0
INSTANCE_OPTIONS = (
    *("--model", str(TINY_LLAMA), "--served-model-name", "tiny-llama", "--port", "0"),
    *("--num-kv-blocks", "1024", "--threads", "1", "--lease-seconds", "10"),
    *("--transport", "tcp", "--transport", "shm", "--kv-pool", "dram=8MiB"),
)


@dataclass
class Deployment:
    """The deployment's processes, and those that it started with.

    Args:
        target: the attackers' view.
        programs: instances by name, and the proxy.
    """

    target: Target
    programs: dict[str, Program]

    def __post_init__(self) -> None:
        self._pids = self.pids()

    def pids(self) -> dict[int, str]:
        """Names by process id, including the programs' children."""
        found = {program.process.pid: name for name, program in self.programs.items()}
        for pid, name in list(found.items()):
            children = descendants(pid)
            found |= {child: f"{name}.{number}" for number, child in enumerate(children, 1)}
        return found

    def lost(self) -> tuple[str, ...]:
        """Names of the original processes that have exited, even if they were replaced."""
        return tuple(name for pid, name in self._pids.items() if not is_running(pid))


@contextmanager
def deployment(connector: str, scratch: Path, slack: float) -> Iterator[Deployment]:
    """Start a new deployment and wait until it is ready.

    Args:
        connector: ``pull`` or ``push``.
        scratch: folder for keys and logs.
        slack: the target's.
    """
    key, secret = "a-clients-key", secrets.token_hex(32)
    (scratch / "keys").write_text(key + "\n")
    (scratch / "secret").write_text(secret)
    common = ["--api-key-file", str(scratch / "keys")]
    with ExitStack() as stack:

        def start(name: str, argv: Sequence[str]) -> Program:
            program = Program(argv, scratch / f"{connector}-{name}.log")
            stack.callback(program.close)
            return program

        programs = {}
        for role in ("prefill", "decode"):
            for number in range(PER_ROLE):
                argv = ["mooncake_engine.cli", "serve", "--role", role, *INSTANCE_OPTIONS, *common]
                argv += ["--kv-secret-file", str(scratch / "secret")]
                argv += ["--kv-connector", CONNECTORS[connector]]
                programs[f"{role}-{number}"] = start(f"{role}-{number}", argv)
        urls = {
            name: program.wait_for("ready ", START_S).split()[1]
            for name, program in programs.items()
        }
        argv = ["mooncake_proxy", "--port", "0", "--workers", str(WORKERS), "--flow", connector]
        for name, url in urls.items():
            argv += [f"--{name.partition('-')[0]}", url]
        programs["proxy"] = start("proxy", [*argv, *common])
        proxy = "http://" + programs["proxy"].wait_for("http://").partition("http://")[2].split()[0]
        target = Target(
            proxy,
            tuple(url for name, url in urls.items() if name.startswith("prefill")),
            tuple(url for name, url in urls.items() if name.startswith("decode")),
            {name: program.process.pid for name, program in programs.items()},
            {url: _when_ready(f"{url}/kv/topology") for url in urls.values()},
            key,
            secret.encode(),
            slack,
        )
        _when_ready(f"{proxy}/ready")
        yield Deployment(target, programs)


def _when_ready(url: str) -> object:
    """Wait until a URL answers 200; returns its JSON."""
    deadline = time.monotonic() + START_S
    while True:
        response = httpx.get(url, timeout=30.0, trust_env=False)
        if response.status_code == 200:
            return response.json()
        if time.monotonic() > deadline:
            raise AssertionError(f"{url} answers {response.status_code}: {response.text}")
        time.sleep(0.1)


class ResidentMemory:
    """Growth of processes' resident memory since this object was created.

    Args:
        names: of the processes, by id.
    """

    figure = "VmRSS"

    def __init__(self, names: dict[int, str]) -> None:
        found = {pid: _mib_of(pid, "VmRSS") for pid in names}
        self._before = {pid: mib for pid, mib in found.items() if mib is not None}
        self._names = names

    def growth_mib(self) -> dict[str, float]:
        """MiB by name; processes that have exited are left out."""
        found = {}
        for pid, before in self._before.items():
            if (now := _mib_of(pid, self.figure)) is not None:
                found[self._names[pid]] = now - before
        return found


class PeakMemory(ResidentMemory):
    """Growth of processes' peak memory since this object was created."""

    figure = "VmHWM"

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__(names)
        for pid in self._before:
            with suppress(FileNotFoundError, ProcessLookupError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")


def _mib_of(pid: int, name: str) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / MIB
    return None  # a zombie
