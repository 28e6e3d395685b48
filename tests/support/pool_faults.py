"""Faults injected into a store under traffic. Each fault is a function of a ``FaultyPool``."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from support.pool_traffic import BATCH, PoolTraffic
from support.store_process import CHUNK_BYTES, SECRET, START_S, StoreProcess, chunk

from mooncake_hal.session.aio import MISSED_KEEPALIVES
from mooncake_hal.session.connection_limits import LIMITS
from mooncake_kv.store.chunk_store import Tier, WriteHandle
from mooncake_kv.store.store_client import StoreClient

DRAM = 24 * CHUNK_BYTES
SSD = "64M"
QUARANTINE_S = 6.0
"""Longer than the traffic's transfer timeout."""
STOP_S = 20.0
"""Upper limit of a store's shutdown with a hung drive."""
WITHOUT_MODE_OVERRIDE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Runs a command as a root user that is subject to file modes, too."""


class FaultyPool:
    """A store with an SSD directory and the traffic that ``start_traffic`` makes for its address.

    The context manager stops the store.
    """

    def __init__(self, directory, start_traffic=PoolTraffic):
        self.directory = directory
        self.ssd = directory / "ssd"
        self.ssd.mkdir()
        self.prefix = () if os.geteuid() else WITHOUT_MODE_OVERRIDE
        self.store = self.start()
        self.traffic = start_traffic(self.store.address)

    def start(self, port=0):
        options = ["--dram", DRAM, "--ssd", f"{self.ssd}:{SSD}"]
        options += ["--quarantine-seconds", QUARANTINE_S]
        return StoreProcess(self.directory, *options, port=port, prefix=self.prefix)

    def restart(self, number):
        port = self.store.port
        self.store.end(number)
        self.store = self.start(port)

    def try_another(self):
        """Run a second store on the same directory, which must not start; returns its result."""
        command = [*self.prefix, sys.executable, "-m", "mooncake_kv", "store", "--port", "0"]
        command += ["--dram", str(DRAM), "--ssd", f"{self.ssd}:{SSD}", "--ssd-segment-bytes", "4M"]
        return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)

    def stats(self):
        client = StoreClient(self.store.address, "faults")
        try:
            assert client.await_store(START_S)
            found = client.stats().result(60)
            assert found is not None
            return found
        finally:
            client.close()

    def segments(self):
        return [path for path in self.ssd.glob("segment-*") if path.stat().st_size]

    def await_segments(self):
        """Wait until SSDs hold something that can be damaged."""
        self.await_level(
            lambda stats: self.segments() and stats.ssd_chunks, "nothing was written to the SSD"
        )

    def await_level(self, holds, complaint):
        deadline = time.monotonic() + 60
        while not holds(self.stats()):
            assert time.monotonic() < deadline, complaint
            time.sleep(0.1)

    def is_ssd_read(self):
        """Whether a chunk is read from the SSD right after other chunks have taken all memory."""
        client = StoreClient(self.store.address, "faults")
        try:
            assert client.await_store(START_S)
            others = [chunk(2000 + number) for number in range(DRAM // CHUNK_BYTES)]
            granted = client.reserve(others).result(60)
            client.abort([each for each in granted if isinstance(each, WriteHandle)]).result(60)
            for found in client.list_chunks(Tier.SSD):
                pinned = [handle for handle in client.pin([found.key]).result(60) if handle]
                client.release(pinned).result(60)
                if pinned and pinned[0].tier is Tier.SSD:
                    return True
            return False
        finally:
            client.close()

    def leaked_handles(self):
        """Number of leaked handles and memory regions once all users are gone."""
        deadline = time.monotonic() + QUARANTINE_S + 20
        while True:
            stats = self.stats()
            leaked = stats.num_pins + stats.num_staging + (stats.abandoned_bytes > 0)
            if not leaked or time.monotonic() > deadline:
                return leaked
            time.sleep(0.2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.end()


def nothing(pool):
    """ordinary traffic"""
    time.sleep(2)


def killed(pool):
    """store killed -9, and started again"""
    for _ in range(3):
        assert pool.traffic.await_hits()
        pool.restart(signal.SIGKILL)


def frozen(pool):
    """store frozen, and thawed"""
    for seconds in (0.5, 4.0):
        pool.store.send(signal.SIGSTOP)
        time.sleep(seconds)
        pool.store.send(signal.SIGCONT)
        assert pool.traffic.await_hits()


def restarted(pool):
    """store stopped cleanly, and started again"""
    for _ in range(2):
        assert pool.traffic.await_hits()
        pool.restart(signal.SIGTERM)


def truncated(pool):
    """SSD files truncated while being read"""
    for keep in (0.5, 0.0):
        pool.await_segments()
        for path in pool.segments():
            os.truncate(path, int(path.stat().st_size * keep))
        time.sleep(1)


def truncated_between(pool):
    """SSD files truncated between two starts"""
    pool.await_segments()
    port = pool.store.port
    pool.store.end(signal.SIGKILL)
    for path in pool.segments():
        os.truncate(path, path.stat().st_size * 2 // 3 + 7)
    pool.store = pool.start(port)


def flipped(pool):
    """bits flipped in SSD files while being read"""
    draw = random.Random(7)
    for _ in range(20):
        pool.await_segments()
        for path in pool.segments():
            with path.open("r+b") as file:
                for _ in range(8):
                    at = draw.randrange(path.stat().st_size)
                    file.seek(at)
                    byte = file.read(1) or b"\0"
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))
        time.sleep(0.1)


def full(pool):
    """disk full"""
    limit = (1 << 20, resource.prlimit(pool.store.pid, resource.RLIMIT_FSIZE)[1])
    resource.prlimit(pool.store.pid, resource.RLIMIT_FSIZE, limit)
    time.sleep(3)
    resource.prlimit(pool.store.pid, resource.RLIMIT_FSIZE, (limit[1], limit[1]))


def read_only(pool):
    """SSD directory read-only"""
    pool.ssd.chmod(0o500)
    for path in pool.ssd.iterdir():
        path.chmod(0o400)
    time.sleep(2)
    pool.store.end(signal.SIGTERM)
    try:
        refused = pool.try_another()
    finally:
        pool.ssd.chmod(0o700)
        for path in pool.ssd.iterdir():
            path.chmod(0o600)
        pool.store = pool.start(pool.store.port)
    assert refused.returncode == 1
    assert "can't be used for a store" in refused.stderr, refused.stderr


def writes_hung(pool):
    """SSD writes that hang, and a shutdown meanwhile"""
    hangs, port = pool.directory / "writes hang", pool.store.port
    pool.store.end()
    program = Path(__file__).with_name("hanging_writes.py")
    pool.prefix = (*pool.prefix, sys.executable, str(program), str(hangs))
    pool.store = pool.start(port)
    for is_stopped in (False, True):
        pool.await_segments()
        hangs.touch()
        pool.await_level(lambda stats: stats.num_ssd_hung_writes, "no drive counts as hung")
        pool.await_level(lambda _: pool.is_ssd_read(), "nothing was read from the SSD")
        assert not pool.stats().num_ssd_hung_reads
        assert pool.traffic.await_hits()
        if is_stopped:
            began = time.monotonic()
            pool.store.end()
            assert time.monotonic() - began < STOP_S, "the store did not stop in time"
        hangs.unlink()
        if is_stopped:
            pool.store = pool.start(port)
        pool.await_level(lambda stats: not stats.num_ssd_hung_writes, "the drive still hangs")


def user_killed(pool):
    """a peer killed in the middle of a read or write"""
    program = (
        "import sys, itertools; sys.path[:0] = ['tests']\n"
        "from support.store_process import *\n"
        f"rank = Rank(StoreAddress('127.0.0.1', {pool.store.port}, {SECRET.encode()!r}), 'tcp')\n"
        "for n in itertools.count():\n"
        f"    numbers = [(n * {BATCH} + i) % 48 for i in range({BATCH})]\n"
        "    rank.put(numbers)\n"
        "    rank.get(numbers)\n"
        "    if n == 2: print('busy', flush=True)\n"
    )
    for number in range(3):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        watchdog = threading.Timer(START_S, child.kill)
        watchdog.start()
        assert child.stdout.readline() == "busy\n"
        watchdog.cancel()
        time.sleep(0.05 * number)
        child.kill()
        child.communicate()


def user_frozen(pool):
    """a peer frozen in a write until it is considered dead"""
    program = (
        "import contextlib, sys; sys.path[:0] = ['tests']\n"
        "from support.store_process import *\n"
        "from mooncake_hal.errors import TransferTimeout\n"
        f"rank = Rank(StoreAddress('127.0.0.1', {pool.store.port}, {SECRET.encode()!r}))\n"
        "arena, handles = rank.client.arena, []\n"
        "while not handles or not all(isinstance(h, WriteHandle) for h in handles):\n"
        "    chunks = [chunk(1000 + n) for n in range(4)]\n"
        "    handles = rank.client.reserve(chunks, lease_s=2.0).result(60)\n"
        "rank.memory[:] = 170\n"
        "peer, spans = rank.peer(arena), rank.spans(handles, arena)\n"
        "def write():\n"
        "    with contextlib.suppress(TransferTimeout):  # while it is frozen\n"
        "        while True: peer.write(spans, timeout=5).wait()\n"
        "for _ in range(4): threading.Thread(target=write).start()\n"
        "print('writes', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_S, child.kill)
    watchdog.start()
    assert child.stdout.readline() == "writes\n"
    watchdog.cancel()
    child.send_signal(signal.SIGSTOP)
    time.sleep((MISSED_KEEPALIVES + 1) * LIMITS.keepalive_s + QUARANTINE_S)
    assert pool.traffic.await_hits()
    child.send_signal(signal.SIGCONT)
    time.sleep(3)
    child.kill()
    child.communicate()


def two_stores(pool):
    """a second store on the same directory"""
    for _ in range(2):
        second = pool.try_another()
        assert second.returncode == 1
        assert "is in use by another store" in second.stderr, second.stderr


FAULTS = {
    "none": nothing,
    "killed": killed,
    "frozen": frozen,
    "restarted": restarted,
    "truncated": truncated,
    "truncated-between": truncated_between,
    "bit-flips": flipped,
    "disk-full": full,
    "read-only": read_only,
    "writes-hung": writes_hung,
    "peer-gone": user_killed,
    "peer-frozen": user_frozen,
    "two-stores": two_stores,
}
