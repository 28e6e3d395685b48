"""Compares KV transfer speed with the machine's limits and with other transfer engines, in one run.

python ci/bench_transfer.py [--rounds N] [--without-peers] [--json FILE]

Prints one line per figure: name, value, bound, ok or short. Installs the other engines into
separate environments under .cache/, and the system libraries that they need.

Exits 0 if all bounds hold, 1 if a figure falls short, else 77 with "skipped: ..." and the reason if
an engine could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from mooncake_hal.bench.machine_limits import memcpy_mover, readv_mover, stream_mover
from mooncake_hal.bench.transfer_speed import (
    Bandwidth,
    Mover,
    TransferShape,
    always,
    compare,
    latency,
    transport_mover,
)
from mooncake_hal.bench.verbs_posting import posting_us

ROOT = Path(__file__).resolve().parent.parent
PEERS_HOME = ROOT / ".cache" / "transfer-peers"
SKIPPED = 77
TOTAL = 256 << 20
RANGE, BLOCKS, SMALL = (TransferShape(TOTAL, size) for size in (TOTAL, 64 << 10, 4 << 10))
THREADS = 2


@dataclass(frozen=True)
class PeerEngine:
    """Packages to install for a third-party engine.

    Args:
        packages: installed with pip.
        without_dependencies: installed with pip without dependencies, which would be a CUDA build
            of torch.
        system: Debian packages of system libraries that the wheels link to.
    """

    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    system: tuple[str, ...] = ()


PEERS = {
    "mooncake": PeerEngine(
        packages=("numpy", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),
        system=("libibverbs1", "libnuma1", "libcurl4"),
    ),
    "nixl": PeerEngine(
        packages=("numpy",), without_dependencies=("nixl==1.5.1", "nixl-cu12==1.5.1")
    ),
}


class PeerFailed(Exception):
    """A peer engine can't be measured; the message has the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


@dataclass(frozen=True)
class Item:
    """A measured figure with its bound."""

    name: str
    figure: float
    wanted: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether the figure is within its bound."""
        return self.figure >= self.wanted if self.at_least else self.figure <= self.wanted

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "ok" if self.holds else "short"
        return f"{self.name} {self.figure:.3g} {sign}{self.wanted:g} {verdict}"


def shm_items(rounds: int, seen: list[Bandwidth]) -> list[Item]:
    """Compare shm with memcpy on as many threads, and with process_vm_readv called from C."""
    items = []
    with ExitStack() as stack:
        limit = stack.enter_context(memcpy_mover(TOTAL, THREADS))
        mapped = stack.enter_context(transport_mover("shm", TOTAL, THREADS, mappable=True))
        for shape, wanted in ((RANGE, 0.9), (BLOCKS, 0.9), (SMALL, 0.8)):
            for operation in ("read", "write"):
                found = compare([limit, mapped], shape, operation, rounds)
                seen += found.values()
                ratio = found["shm"].faster_than(found[limit.name])
                items.append(Item(f"shm/memcpy {operation} {shape}", ratio, wanted))
        late = latency(mapped, 4096, 2000)
        items.append(Item("shm read of 4 KiB p50 us", late.p50_us, 5, at_least=False))
    with ExitStack() as stack:
        limit = stack.enter_context(readv_mover(TOTAL, THREADS))
        called = stack.enter_context(transport_mover("shm", TOTAL, THREADS, mappable=False))
        found = compare([limit, called], SMALL, "read", rounds)
        seen += found.values()
        ratio = found["shm"].faster_than(found[limit.name])
        items.append(Item(f"shm unmapped/process_vm_readv read {SMALL}", ratio, 0.9))
    return items


def tcp_items(
    rounds: int, peers: list[Mover], seen: list[Bandwidth], unmeasured: list[str]
) -> list[Item]:
    """Compare tcp with plain streams and with the peers; ``unmeasured`` is extended by failures."""
    items = []
    with ExitStack() as stack:
        limit = stack.enter_context(stream_mover(TOTAL, THREADS))
        tcp = stack.enter_context(transport_mover("tcp", TOTAL, THREADS, mappable=False))
        # a round takes 50 ms, and the two differ by a few per cent at most: run many rounds
        streamed = compare([limit, tcp], RANGE, "read", 8 * rounds)
        seen += streamed.values()
        ratio = streamed["tcp"].faster_than(streamed[limit.name])
        items.append(Item("tcp/stream read of one range", ratio, 0.95))
        for operation in ("read", "write"):
            for shape in (RANGE, BLOCKS, SMALL):
                found, failures = _compare_with_peers(tcp, peers, shape, operation, rounds)
                unmeasured += failures
                seen += found.values()
                items += _against(found, shape, operation)
            found = compare([tcp, always(tcp, SMALL, "pieces")], RANGE, operation, rounds)
            ratio = found["pieces"].faster_than(found["tcp"])
            items.append(Item(f"tcp {operation} 4 KiB pieces/one range", ratio, 0.5))
        late = latency(tcp, 4096, 2000)
        items.append(Item("tcp read of 4 KiB p50 us", late.p50_us, 25, at_least=False))
    return items


def rdma_items(rounds: int) -> list[Item]:
    """Cost of posting to a NIC, measured without the wire; needs no RDMA device."""
    items = []
    for shape in (SMALL, TransferShape(64 << 20, 64 << 10)):
        cost = posting_us(shape, rounds)
        items.append(Item(f"rdma posting us of CPU per span, {shape}", cost, 2, at_least=False))
    return items


def _compare_with_peers(
    tcp: Mover, peers: list[Mover], shape: TransferShape, operation: str, rounds: int
) -> tuple[dict[str, Bandwidth], list[str]]:
    """Compare with the peers; one that fails at a shape is skipped there, and listed in the second
    result."""
    able, failures = list(peers), []
    while True:
        try:
            return compare([tcp, *able], shape, operation, rounds), failures
        except PeerFailed as exc:
            failures.append(f"{exc.name}, {operation} {shape}: {exc}")
            able = [peer for peer in able if peer.name != exc.name]


def _against(found: dict[str, Bandwidth], shape: TransferShape, operation: str) -> list[Item]:
    wanted = {RANGE: 2.5, BLOCKS: 1.0, SMALL: 6.0}[shape]
    ours, items = found["tcp"], []
    for name, theirs in found.items():
        if name == "tcp":
            continue
        speed = ours.faster_than(theirs)
        cpu = ours.cpu_s_per_gib / theirs.cpu_s_per_gib
        items.append(Item(f"tcp/{name} {operation} {shape}", speed, wanted))
        items.append(Item(f"tcp/{name} CPU {operation} {shape}", cpu, 0.5, at_least=False))
    return items


def read_answer(name: str, stdout: IO[str] | None, log: str) -> dict[str, float]:
    """Read the next answer of a peer's process: a line of JSON after an @. Skips other lines, which
    the engine prints.

    Raises:
        PeerFailed: the peer reports an error, or has exited; then with the last line of its log.
    """
    for line in stdout or ():
        if line.startswith("@"):
            answer: dict[str, float] = json.loads(line[1:])
            if "error" in answer:
                raise PeerFailed(name, str(answer["error"]))
            return answer
    last = Path(log).read_text().strip().rpartition("\n")[2]
    raise PeerFailed(name, f"it exited: {last} (see {log})")


@contextmanager
def peer_mover(name: str) -> Iterator[Mover]:
    """Run a peer engine in its own environment.

    Engines that poll keep a core busy when idle, so the process is stopped (SIGSTOP) between turns.

    Raises:
        PeerFailed: it can't be installed, or does not start.
    """
    python = install(name)
    command = [str(python), str(ROOT / "ci" / "bench_peers.py"), name, str(TOTAL)]
    log = (PEERS_HOME / f"{name}.log").open("w")
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(**question: object) -> dict[str, float]:
        assert process.stdin is not None
        os.killpg(process.pid, signal.SIGCONT)
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = read_answer(name, process.stdout, log.name)
        os.killpg(process.pid, signal.SIGSTOP)
        return answer

    def prepare(shape: TransferShape, operation: str) -> Callable[[], object]:
        ask(shape=[shape.total_bytes, shape.piece_bytes], operation=operation)
        return lambda: ask(move=1)

    try:
        read_answer(name, process.stdout, log.name)
        os.killpg(process.pid, signal.SIGSTOP)
        yield Mover(name, prepare, lambda: ask(cpu=1)["cpu"])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        process.stdin.close()
        process.wait(60)
        log.close()


def install(name: str, peer: PeerEngine | None = None) -> Path:
    """Install a peer into its own environment, with the system libraries that it needs; returns the
    environment's Python.

    Raises:
        PeerFailed: pip or apt-get fails.
    """
    peer, home = peer or PEERS[name], PEERS_HOME / name
    python = home / "bin" / "python"
    if peer.system:
        _install_by(name, str(ROOT / "ci" / "apt-install"), *peer.system)
    if (home / "installed").exists():
        return python
    venv.create(home, with_pip=True, clear=True)
    pip = (str(python), "-m", "pip", "install", "-q")
    _install_by(name, *pip, *peer.packages)
    if peer.without_dependencies:
        _install_by(name, *pip, "--no-deps", *peer.without_dependencies)
    (home / "installed").touch()
    return python


def _install_by(name: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailed(name, f"{' '.join(command)}: {done.stderr[-300:].strip()}")


def open_peers(stack: ExitStack, unmeasured: list[str]) -> list[Mover]:
    """Install and start the peers; ``unmeasured`` is extended by those that fail, with reasons."""
    movers = []
    for name in PEERS:
        try:
            movers.append(stack.enter_context(peer_mover(name)))
        except PeerFailed as exc:
            unmeasured.append(f"{name}: {exc}")
    return movers


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all bandwidths to FILE")
    arguments = parser.parse_args()
    seen: list[Bandwidth] = []
    unmeasured: list[str] = []
    items = rdma_items(arguments.rounds) + shm_items(arguments.rounds, seen)
    with ExitStack() as stack:
        peers = [] if arguments.without_peers else open_peers(stack, unmeasured)
        items += tcp_items(arguments.rounds, peers, seen, unmeasured)
    for item in items:
        print(item)
    for reason in unmeasured:
        print(f"skipped: {reason}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(item) for item in seen], indent=2) + "\n")
    if not all(item.holds for item in items):
        return 1
    return SKIPPED if unmeasured else 0


if __name__ == "__main__":
    sys.exit(main())
