"""A store in a process of its own is shared, killed, frozen, restarted and filled up: it never
returns wrong bytes and never hangs its users."""

import ctypes
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from support.ports import free_range
from support.store_process import CHUNK_BYTES, SECRET, START_S, Rank, StoreProcess, chunk

from mooncake_hal.errors import TransferError
from mooncake_kv.store.chunk_store import Residence

pytestmark = pytest.mark.timeout(600)
DRAM = 8 * CHUNK_BYTES


@pytest.fixture
def started(tmp_path):
    """Starts stores and ranks, and stops them."""
    opened = []

    def start(*options, dram=DRAM, **kwargs):
        opened.append(StoreProcess(tmp_path, "--dram", dram, *options, **kwargs))
        return opened[-1]

    def join(store, transport="shm"):
        opened.append(Rank(store.address, transport))
        return opened[-1]

    start.rank = join
    yield start
    for each in reversed(opened):
        each.close() if isinstance(each, Rank) else each.end()


def await_store(rank, timeout=START_S):
    assert rank.client.await_store(timeout)


def await_ssd(rank, numbers):
    """Wait until the SSDs hold all these chunks; polls, since the writer is another process."""
    deadline = time.monotonic() + 60
    while rank.client.stats().result(60).ssd_chunks < len(numbers):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_store_exits_whichever_thread_receives_the_signal(started):
    """The kernel may choose any thread while another signal is pending for the first one."""
    store = started()
    threads = {int(path.name) for path in Path(f"/proc/{store.pid}/task").iterdir()}
    thread = min(threads - {store.pid})
    time.sleep(0.5)  # until the first thread waits; a running one would handle the signal
    tgkill = 234 if platform.machine() == "x86_64" else 131
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(tgkill, store.pid, thread, signal.SIGTERM) == 0
    assert store.wait(START_S) == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_chunk_put_by_one_process_is_read_by_another(started, transport):
    store = started()
    assert "0.00195 GiB of memory, 0 GiB on SSDs with 0 chunks" in store.ready_line
    writer, reader = started.rank(store), started.rank(store, transport)
    assert writer.put([1, 2, 3]) == [True] * 3
    assert reader.get([1, 9, 3]) == [True, False, True]
    assert reader.put([4]) == [True]
    assert writer.get([4]) == [True]
    assert store.end() == 0


def test_dead_users_leave_no_reservations_or_pins(started):
    store = started("--quarantine-seconds", "0.2")
    rank = started.rank(store)
    program = (
        "import sys; sys.path[:0] = ['tests']\n"
        "from support.store_process import *\n"
        f"rank = Rank(StoreAddress('127.0.0.1', {store.port}, {SECRET.encode()!r}))\n"
        "rank.client.reserve([chunk(n) for n in range(8)], lease_s=100).result(60)\n"
        "print('reserved', flush=True)\n"
        "input()\n"
    )
    dying = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert dying.stdout.readline() == "reserved\n"
    assert rank.put([1]) == [False], "all memory is taken"
    dying.kill()
    dying.communicate()
    deadline = time.monotonic() + 60
    while rank.put([20]) == [False]:
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    stats = rank.client.stats().result(60)
    assert (stats.num_staging, stats.abandoned_bytes) == (0, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_store_killed_during_reads_is_a_miss(started, transport):
    store = started()
    rank = started.rank(store, transport)
    assert rank.put([1, 2, 3]) == [True] * 3
    killer = threading.Timer(0.1, store.send, [signal.SIGKILL])
    killer.start()
    outcomes = read_until_lost(rank)
    killer.join()
    assert outcomes[0] == "hit"
    assert outcomes[-1] == "miss"
    assert store.end() == -signal.SIGKILL
    again = started(port=store.port)
    assert again.port == store.port
    await_store(rank)
    assert rank.get([1]) == [False], "a new store has nothing of the old one's memory"
    assert rank.put([1]) == [True]
    assert rank.get([1]) == [True]


def read_until_lost(rank):
    """Get chunk 1 repeatedly; returns each result, up to the first miss."""
    outcomes, deadline = [], time.monotonic() + 120
    while "miss" not in outcomes:
        assert time.monotonic() < deadline, "stuck"
        try:
            outcomes.append("hit" if rank.get([1], timeout=5) == [True] else "miss")
        except TransferError:
            outcomes.append("miss")
    return outcomes


def test_frozen_store_costs_one_timeout_and_reconnects(started):
    store = started()
    rank = started.rank(store)
    assert rank.put([1]) == [True]
    store.send(signal.SIGSTOP)
    assert rank.client.probe([chunk(1).key]).result(60) == [Residence.DRAM], "sends no message"
    for _ in range(100):
        assert rank.get([1]) == [False]
    assert rank.client.probe([chunk(1).key]).result(60) == [Residence.ABSENT]
    store.send(signal.SIGCONT)
    await_store(rank)
    assert rank.get([1]) == [True]


def test_killed_store_recovers_ssd_contents_without_wrong_bytes(started, tmp_path):
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    store = started("--ssd", f"{ssd}:64M")
    known = []
    for round_number in range(3):
        rank = started.rank(store)
        numbers = list(range(round_number * 10, round_number * 10 + 4))
        known += numbers
        assert rank.put(numbers) == [True] * 4
        assert rank.get(numbers) == [True] * 4
        await_ssd(rank, known)
        others = range(round_number * 10 + 5, round_number * 10 + 9)
        assert rank.put(others) == [True] * 4
        rank.client.touch([chunk(n).key for n in others])  # writes have started
        store.send(signal.SIGKILL)
        store.end()
        store = started("--ssd", f"{ssd}:64M")
        again = started.rank(store)
        hits = [hit for n in range(0, len(known), 4) for hit in again.get(known[n : n + 4])]
        assert hits == [True] * len(known)
        again.get(others)  # hits or misses; never wrong bytes


def test_damaged_ssd_records_are_detected_and_dropped(started, tmp_path):
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    store = started("--ssd", f"{ssd}:64M")
    rank = started.rank(store)
    assert rank.put(range(4)) == [True] * 4
    assert rank.get(range(4)) == [True] * 4
    await_ssd(rank, range(4))
    (segment,) = ssd.glob("segment-*")
    with segment.open("r+b") as file:
        file.seek(4096 + 4096 + 1000)  # in the first record's bytes
        file.write(b"\xff")
    command = [sys.executable, "-m", "mooncake_kv", "verify", "--port", str(store.port)]
    command += ["--kv-secret-file", str(store.secret_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "3 records are intact, 1 were damaged and have been dropped" in done.stdout


def test_full_disk_loses_copies_only(started, tmp_path):
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    store = started("--ssd", f"{ssd}:64M")
    resource.prlimit(store._process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    rank = started.rank(store)
    assert rank.put(range(4)) == [True] * 4
    for _ in range(3):
        assert rank.get(range(4)) == [True] * 4
    deadline = time.monotonic() + 60
    while not (stats := rank.client.stats().result(60)).num_ssd_errors:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    assert stats.ssd_chunks == 0
    assert not list(ssd.glob("segment-*"))


@pytest.mark.parametrize("case", ["taken", "unwritable", "too much memory"])
def test_store_that_cannot_start_reports_why(started, tmp_path, case):
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    dram, directory, reason = str(DRAM), ssd, "is in use by another store"
    if case == "taken":
        started("--ssd", f"{ssd}:64M")
    elif case == "unwritable":
        directory, reason = "/proc", "/proc can't be used for a store"
        if os.geteuid():  # root may write to any directory but this kind
            ssd.chmod(0o500)
            directory, reason = ssd, "can't be used for a store: [Errno 13] Permission denied"
    else:
        dram, reason = "1000T", "this host can provide"
    command = [sys.executable, "-m", "mooncake_kv", "store", "--dram", dram, "--port", "0"]
    command += ["--ssd", f"{directory}:64M", "--ssd-segment-bytes", "4M"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_operator_inspects_store_and_drops_chunks(started, tmp_path):
    (metrics_port,) = free_range(1)
    options = ["--tenant-quota", "t=1M", "--eviction", "lru", "--metrics-port", metrics_port]
    (tmp_path / "ssd").mkdir()
    store = started(*options, "--ssd", f"{tmp_path / 'ssd'}:16M")
    rank = started.rank(store)
    assert rank.put([1, 2, 3]) == [True] * 3
    assert rank.get([1, 2, 3]) == [True] * 3
    await_ssd(rank, [1, 2, 3])

    def run(*words):
        command = [sys.executable, "-m", "mooncake_kv", *words, "--port", str(store.port)]
        command += ["--kv-secret-file", str(store.secret_file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True)

    assert "num_puts                3\n" in run("stats").stdout
    assert "mooncake_store_puts_total 3\n" in run("stats", "--prometheus").stdout
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60) as page:
        assert b"mooncake_store_puts_total 3\n" in page.read()
    for tier in ("dram", "ssd"):
        lines = run("ls", "--tier", tier).stdout.splitlines()
        assert lines == [f"{tier} {chunk(n).key.hex()} 0 {CHUNK_BYTES} " for n in (1, 2, 3)]
    assert run("verify").stdout == "3 records are intact, 0 were damaged and have been dropped\n"
    assert run("drop", "--key", chunk(2).key.hex()).stdout == "1 chunks dropped\n"
    assert run("drop", "--all").stdout == "2 chunks dropped\n", "each chunk is in two tiers"
    assert run("ls").stdout == ""
    assert '"num_evicted": {\n    "drop": 3\n  }' in run("stats", "--json").stdout


def test_command_without_store_reports_searched_path():
    command = [sys.executable, "-m", "mooncake_kv", "stats", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 1
    assert "no store answers at 127.0.0.1 port 1: start one with" in done.stderr
