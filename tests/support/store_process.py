"""``mooncake-kv store`` as a child process, and a rank that puts to it and gets from it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from mooncake_engine.process.child_processes import die_with_parent
from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Spans
from mooncake_kv.store.chunk_store import Chunk, WriteHandle
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress

SECRET = "a deployment's secret"
START_S = 120.0
CHUNK_BYTES = 256 << 10


class StoreProcess:
    """A store in a process of its own; ``options`` are those of the command, ``--dram`` included.

    ``prefix`` is a command that runs the store's command.
    """

    def __init__(self, directory, *options, port=0, prefix=(), secret=SECRET):
        self.secret_file = directory / "secret"
        self.secret_file.write_text(secret)
        command = [sys.executable, "-m", "mooncake_kv", "store"]
        command += ["--kv-secret-file", str(self.secret_file)]
        command += ["--port", str(port), "--ssd-segment-bytes", "4M", "--ssd-min-free-bytes", "0"]
        self.log = (directory / "store.log").open("ab")
        self._process = subprocess.Popen(
            [*prefix, *command, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            preexec_fn=die_with_parent(),
        )
        watchdog = threading.Timer(START_S, self._process.kill)
        watchdog.start()
        self.ready_line = self._process.stdout.readline()
        watchdog.cancel()
        found = re.search(r"tcp://127.0.0.1:(\d+) ", self.ready_line)
        assert found, (directory / "store.log").read_text()
        self.port = int(found[1])

    @property
    def address(self):
        return StoreAddress("127.0.0.1", self.port, SECRET.encode())

    @property
    def pid(self):
        return self._process.pid

    def send(self, number):
        """Send a signal; after SIGSTOP, wait until all threads have stopped."""
        os.kill(self.pid, number)
        deadline = time.monotonic() + START_S
        while number == signal.SIGSTOP and not all(map(_is_stopped, self._threads())):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _threads(self):
        return Path(f"/proc/{self.pid}/task").glob("*/stat")

    def end(self, number=signal.SIGTERM):
        """Send a signal and wait for the exit; returns the status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
        return self.wait(START_S)

    def wait(self, timeout_s):
        """The exit status, once it has exited."""
        status = self._process.wait(timeout_s)
        self._process.stdout.close()
        self.log.close()
        return status


def _is_stopped(stat):
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return True  # the thread has exited


class WrongBytes(AssertionError):
    """The bytes of a hit differ from those that were put."""


class Rank:
    """The memory of a process that uses a store: registered with transports, with a session."""

    def __init__(self, address, transport="shm", num_chunks=4, chunk_bytes=CHUNK_BYTES):
        self.client = StoreClient(address, "rank")
        options = EndpointOptions(secret=address.secret)
        self.transports = Transports.open(Registry.discover(), options, wanted=transport)
        self.set_up(num_chunks, chunk_bytes)
        assert self.client.await_store(START_S)

    def set_up(self, num_chunks, chunk_bytes):
        """Register memory for that many chunks."""
        self.chunk_bytes = chunk_bytes
        self.memory = np.zeros(num_chunks * chunk_bytes, np.uint8)
        self.transports.register(MemoryRegion(self.memory.ctypes.data, self.memory.nbytes))
        self._peer = None
        self._epoch = None

    def peer(self, arena):
        if self._epoch != arena.epoch:
            if self._peer is not None:
                self._peer.close()
            self._peer = self.transports.connect(arena.endpoints, timeout=30).peer
            self._epoch = arena.epoch
        return self._peer

    def spans(self, handles, arena):
        size = self.chunk_bytes
        local = self.memory.ctypes.data + np.arange(len(handles), dtype=np.uint64) * size
        offsets = np.array([handle.offset for handle in handles], np.uint64)
        return Spans(local, arena.address + offsets, np.full(len(handles), size, np.uint64))

    def put(self, numbers, timeout=30):
        """Put chunks with contents derived from their numbers; returns whether each was stored."""
        arena = self.client.arena
        grants = self.client.reserve([chunk(number) for number in numbers]).result(60)
        handles = [grant for grant in grants if isinstance(grant, WriteHandle)]
        if not handles or arena is None:
            return [False] * len(numbers)
        wanted = [n for n, g in zip(numbers, grants, strict=True) if isinstance(g, WriteHandle)]
        for index, number in enumerate(wanted):
            self.memory[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES] = content(number)
        self.peer(arena).write(self.spans(handles, arena), timeout=timeout).wait()
        return self.client.commit(handles).result(60)

    def get(self, numbers, timeout=30):
        """Whether each was a hit; wrong bytes in a hit fail the test."""
        arena = self.client.arena
        pinned = self.client.pin([chunk(number).key for number in numbers]).result(60)
        found = [(n, h) for n, h in zip(numbers, pinned, strict=True) if h is not None]
        if not found or arena is None:
            return [False] * len(numbers)
        handles = [handle for _, handle in found]
        self.memory[:] = 0
        self.peer(arena).read(self.spans(handles, arena), timeout=timeout).wait()
        copies = self.memory.copy()
        valid = dict(
            zip([n for n, _ in found], self.client.release(handles).result(60), strict=True)
        )
        for index, (number, _) in enumerate(found):
            if valid[number]:
                part = copies[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                if not np.array_equal(part, content(number)):
                    raise WrongBytes(f"wrong bytes for chunk {number}")
        return [valid.get(number, False) for number in numbers]

    def close(self):
        self.client.close()
        self.transports.close()


def chunk(number, tenant=""):
    """A chunk of a sequence of its own."""
    return Chunk(b"chunk-%d" % number, None, 0, CHUNK_BYTES, 16, tenant)


def content(number):
    """The bytes of a chunk: its number, repeated."""
    return np.resize(np.frombuffer(b"<%d>" % number * 9, np.uint8), CHUNK_BYTES)
