"""Compares the pool with Mooncake Store over tcp and LMCache's local CPU backend, in one run.

Used by ci/bench_pool.py. Each store moves the same objects in batches: into memory of its own
process ("own"), and of another process on the same host ("other").
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median

import numpy as np
from bench_transfer import (
    PEERS as TRANSFER_PEERS,
    PEERS_HOME,
    Item,
    PeerEngine,
    PeerFailed,
    install,
    read_answer,
)
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.store_process import Rank, StoreProcess  # noqa: E402  # tests/ is not installed

from mooncake_hal.negotiation import Transports  # noqa: E402
from mooncake_hal.registry import Registry  # noqa: E402
from mooncake_hal.transport import EndpointOptions  # noqa: E402
from mooncake_kv.store.chunk_keys import KEY_BYTES  # noqa: E402
from mooncake_kv.store.chunk_store import Chunk  # noqa: E402
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig  # noqa: E402

SHAPES = ((128, 1 << 20), (1024, 64 << 10))
"""Number of objects, and bytes per object."""
OPERATIONS = ("put", "get")
BOUNDED = ("mooncake-own", "mooncake-other")
AT_LEAST, AT_MOST = 3.0, 0.5
"""Bounds relative to Mooncake Store: minimum speed, maximum CPU time."""
WARM_UP = 2
CORES = len(os.sched_getaffinity(0))
Bytes = NDArray[np.uint8]

LMCACHE = PeerEngine(
    packages=(
        "torch==2.13.0", "numpy<=2.2.6", "aiofile", "aiofiles", "blake3", "msgspec", "nvtx",
        "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml", "pyzmq", "safetensors",
        "sortedcontainers", "cachetools", "opentelemetry-api<=1.40.0", "opentelemetry-sdk",
        "aiohttp", "httpx", "fastapi", "requests", "redis", "huggingface_hub", "transformers>=5.4",
        "cryptography", "numba",
    ),
    without_dependencies=("lmcache==0.5.6",),  # its dependencies include a CUDA build of torch
)  # fmt: skip
PEERS = {
    "mooncake-own": ("mooncake", TRANSFER_PEERS["mooncake"]),
    "mooncake-other": ("mooncake", TRANSFER_PEERS["mooncake"]),
    "lmcache": ("lmcache", LMCACHE),
}


@dataclass(frozen=True)
class Side:
    """A store under test: our own or another.

    Args:
        name: shown in the printed lines.
        prepare: called with the number of objects and their size in bytes.
        calls: ``put`` and ``get`` of all objects, by name; each returns its seconds.
        cpu_s: returns the CPU seconds so far of all its processes.
    """

    name: str
    prepare: Callable[[int, int], object]
    calls: dict[str, Callable[[], float]]
    cpu_s: Callable[[], float]


def beside_peers(rounds: int, unmeasured: list[str]) -> list[Item]:
    """Compare with all peers; prints a line per speed.

    Args:
        rounds: of each peer.
        unmeasured: extended by the peers that can't be measured, with reasons.
    """
    items = []
    for name, (environment, engine) in PEERS.items():
        with ExitStack() as stack:
            try:
                peer = stack.enter_context(peer_side(name, environment, engine))
                our_side = other_process if name == "mooncake-other" else own_process
                ours = stack.enter_context(our_side())
                for shape in SHAPES:
                    items += compare(ours, peer, shape, rounds)
            except PeerFailed as exc:
                unmeasured.append(f"{name}: {exc}")
    return items


def compare(ours: Side, peer: Side, shape: tuple[int, int], rounds: int) -> list[Item]:
    """Run both stores in turns with one shape."""
    count, nbytes = shape
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for side in (ours, peer):
        side.prepare(count, nbytes)
    source = np.ones(count * nbytes, np.uint8)
    target = np.zeros_like(source)
    copies: dict[int, list[float]] = {1: [], CORES: []}
    for _ in range(rounds + WARM_UP):
        for num_threads, elapsed in copies.items():
            elapsed.append(memcpy_s(target, source, num_threads))
        for side in (ours, peer):
            for operation in OPERATIONS:
                before = side.cpu_s()
                elapsed = side.calls[operation]()
                spent = side.cpu_s() - before
                found.setdefault((side.name, operation), []).append((elapsed, spent))
    items, total = [], count * nbytes
    for num_threads, elapsed in copies.items():
        speed = total / median(elapsed[WARM_UP:]) / 1e9
        print(f"memcpy of {total >> 20} MiB, {num_threads} threads: {speed:.2f} GB/s", flush=True)
    for operation in OPERATIONS:
        shown = {}
        for side in (ours, peer):
            samples = found[side.name, operation][WARM_UP:]
            speed = total / median(elapsed for elapsed, _ in samples) / 1e9
            cpu = sum(spent for _, spent in samples) / len(samples) / total * (1 << 30)
            shown[side.name] = speed, max(cpu, 1e-3)
        (our_speed, our_cpu), (speed, cpu) = shown[ours.name], shown[peer.name]
        what = f"{operation} of {nbytes >> 10} KiB"
        print(f"{what}, {ours.name}: {our_speed:.2f} GB/s, {our_cpu:.2f} CPU s/GiB; {peer.name}: "
              f"{speed:.2f} GB/s, {cpu:.2f} CPU s/GiB", flush=True)  # fmt: skip
        if peer.name in BOUNDED:
            name = f"pool/{peer.name}"
            items.append(Item(f"{name} {what}", our_speed / speed, AT_LEAST))
            items.append(Item(f"{name} CPU {what}", our_cpu / cpu, AT_MOST, at_least=False))
    return items


def memcpy_s(target: Bytes, source: Bytes, num_threads: int) -> float:
    """Seconds of one copy; with one thread per core, the memory's limit."""
    parts = zip(
        np.array_split(target, num_threads), np.array_split(source, num_threads), strict=True
    )
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda _: None, range(num_threads)))  # starts the threads
        began = time.perf_counter()
        list(threads.map(lambda part: np.copyto(*part), parts))
        return time.perf_counter() - began


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class OwnRank(Rank):
    """A rank with its store in the same process."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        registry = Registry.discover()
        options = EndpointOptions(secret=b"secret")
        self.store = NodeStore(NodeStoreConfig(2 * nbytes))
        self.served = Transports.open(registry, options, wanted="shm")
        self.store.offer(self.served)
        self.client = self.store.open_user()
        self.transports = Transports.open(registry, options, wanted="shm")
        self.set_up(nbytes // chunk_bytes, chunk_bytes)

    def close(self) -> None:
        super().close()
        self.served.close()
        self.store.close()


class Objects:
    """The objects that a rank of ours puts and gets, all at once."""

    def __init__(self, make: Callable[[int, int], Rank]) -> None:
        self._make = make
        self.rank: Rank | None = None
        self._round = 0

    def prepare(self, count: int, nbytes: int) -> None:
        self.close()
        self.rank = self._make(count * nbytes, nbytes)
        self.rank.memory[:] = 7
        self._count, self._nbytes = count, nbytes

    def put(self) -> float:
        rank = self.rank
        assert rank is not None
        keys = [chunk.key for chunk in self._chunks()]
        rank.client.drop(keys).result(60)
        self._round += 1
        chunks = self._chunks()
        began = time.perf_counter()
        handles = rank.client.reserve(chunks).result(60)
        arena = rank.client.arena
        rank.peer(arena).write(rank.spans(handles, arena), timeout=60).wait()
        is_stored = rank.client.commit(handles).result(60)
        elapsed = time.perf_counter() - began
        assert all(is_stored)
        return elapsed

    def get(self) -> float:
        rank = self.rank
        assert rank is not None
        keys = [chunk.key for chunk in self._chunks()]
        began = time.perf_counter()
        handles = rank.client.pin(keys).result(60)
        arena = rank.client.arena
        rank.peer(arena).read(rank.spans(handles, arena), timeout=60).wait()
        is_valid = rank.client.release(handles).result(60)
        elapsed = time.perf_counter() - began
        assert all(is_valid)
        return elapsed

    def _chunks(self) -> list[Chunk]:
        """Chunks of one sequence; their keys are hashes, like all chunk keys."""
        names = [f"{self._round}-{i}".encode() for i in range(self._count)]
        keys = [blake2b(name, digest_size=KEY_BYTES).digest() for name in names]
        parents = [None, *keys]
        return [Chunk(key, parents[i], i, self._nbytes, 16) for i, key in enumerate(keys)]

    def close(self) -> None:
        if self.rank is not None:
            self.rank.close()
            self.rank = None


@contextmanager
def own_process() -> Iterator[Side]:
    """Our store in this process."""
    objects = Objects(OwnRank)
    calls = {"put": objects.put, "get": objects.get}
    try:
        yield Side("own store", objects.prepare, calls, own_cpu_s)
    finally:
        objects.close()


@contextmanager
def other_process() -> Iterator[Side]:
    """Our store in another process."""
    with tempfile.TemporaryDirectory() as directory:
        total = max(count * nbytes for count, nbytes in SHAPES)
        store = StoreProcess(Path(directory), "--dram", 2 * total)
        objects = Objects(
            lambda nbytes, size: Rank(store.address, "shm", nbytes // size, chunk_bytes=size)
        )
        calls = {"put": objects.put, "get": objects.get}
        try:
            yield Side(
                "other store",
                objects.prepare,
                calls,
                lambda: own_cpu_s() + process_cpu_s(store.pid),
            )
        finally:
            objects.close()
            store.end()


@contextmanager
def peer_side(name: str, environment: str, engine: PeerEngine) -> Iterator[Side]:
    """Run a peer in its own environment.

    Raises:
        PeerFailed: it can't be installed, does not start, or fails.
    """
    python = install(environment, engine)
    log = (PEERS_HOME / f"{name}.log").open("w")
    command = [str(python), str(ROOT / "ci" / "bench_pool_peers.py"), name]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(**question: object) -> dict[str, float]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return read_answer(name, process.stdout, log.name)

    calls = {
        "put": lambda: ask(put=1)["seconds"],
        "get": lambda: ask(get=1)["seconds"],
    }
    try:
        read_answer(name, process.stdout, log.name)
        yield Side(
            name,
            lambda count, nbytes: ask(shape=[count, nbytes]),
            calls,
            lambda: ask(cpu=1)["seconds"],
        )
    finally:
        process.stdin.close()
        process.wait(60)
        log.close()
