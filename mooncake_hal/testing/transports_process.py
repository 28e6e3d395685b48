"""The part of the transport suite that needs a second process: kills, restarts, leaks."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mooncake_hal.errors import PeerLost, TransferError, TransferTimeout
from mooncake_hal.testing.transports import MIB, TransportKit, one_span, raises, stripes
from mooncake_hal.testing.transports_peer import PeerProcess, content
from mooncake_hal.transport import Endpoint, EndpointOptions, Spans

NUM_BUSY_TRANSFERS = 16
"""Number of transfers of one peer after which a further one is either queued, or can be cancelled
while it is in flight."""


class Leftovers(NamedTuple):
    """Resources that a process or the machine may be left with if something is not closed."""

    descriptors: int
    threads: int
    mapped_files: frozenset[str]
    shared_memory: frozenset[str]


def leftovers(known: frozenset[str] | None = None) -> Leftovers:
    """Count the resources of this process, and list the files in /dev/shm.

    Args:
        known: names that were in /dev/shm before. If given, files that other programs have created
            or removed since are left out; None lists all files.
    """
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    named = [parts[5] for parts in lines if len(parts) == 6]
    return Leftovers(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        mapped_files=frozenset(name for name in named if name.startswith(("/memfd", "/dev"))),
        shared_memory=(
            frozenset(os.listdir("/dev/shm")) if known is None else known | _left_in_shm(known)
        ),
    )


_SEMAPHORES = "sem.mp-"
"""Prefix of the semaphores of Python's multiprocessing. No transport creates any; programs that are
killed leave theirs behind."""


def _left_in_shm(known: frozenset[str]) -> set[str]:
    """New files of this user that no other process has mapped or open.

    All processes of a host share /dev/shm, and a file does not tell which process created it. But
    files of other programs are in use, and those left behind by a transport or its dead peer are
    not.
    """
    new = set()
    for name in set(os.listdir("/dev/shm")) - known:
        if name.startswith(_SEMAPHORES):
            continue
        with suppress(FileNotFoundError):
            if os.stat(f"/dev/shm/{name}").st_uid == os.getuid():
                new.add(name)
    if new:
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) != os.getpid():
                new -= _shared_memory_of(process)
    return new


def _shared_memory_of(process: Path) -> set[str]:
    """Names in /dev/shm that a process has mapped or open; none if it has ended or is another
    user's."""
    used = set()
    with suppress(OSError):
        used = {line.rpartition(" ")[2] for line in (process / "maps").read_text().splitlines()}
        used |= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    return {path.removeprefix("/dev/shm/") for path in used if path.startswith("/dev/shm/")}


class TransportProcessConformance(TransportKit):
    """The cases with two processes, including the death of one."""

    death_seconds = 10.0
    """Time within which a transfer must detect the death of its peer, even if its own deadline is
    later."""

    stopped_seconds = 0.5
    """Timeout of a transfer with a stopped peer; ``read`` must return well before that."""

    def child(self, nbytes: int, options: EndpointOptions | None = None) -> PeerProcess:
        """Start a peer process that is closed at the end of the case."""
        return self.stack.enter_context(
            PeerProcess(self.loader, self.allocator, options or self.options(), nbytes)
        )

    def test_between_processes(self) -> None:
        nbytes = 8 * MIB
        child = self.child(nbytes)
        near, here = self.open(), self.buffer(nbytes)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        spans = one_span(here.region.address, child.region.address, nbytes)
        wanted = here.get()
        self.write(peer, spans)
        assert child.ask(do="digest")["digest"] == hashlib.sha256(wanted.tobytes()).hexdigest()
        here.put(np.zeros(nbytes, np.uint8))
        self.read(peer, spans)
        assert (here.get() == wanted).all()

    def test_scattered_between_processes(self) -> None:
        count, size = 20000, 256
        nbytes = count * size
        child = self.child(nbytes)
        near, here = self.open(), self.buffer(nbytes)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        order = self.rng.permutation(count)
        spans = Spans(
            (np.arange(count) * size + here.region.address).astype(np.uint64),
            (order * size + child.region.address).astype(np.uint64),
            np.full(count, size, np.uint64),
        )
        self.read(peer, spans)
        wanted = content(1, nbytes).reshape(count, size)[order].reshape(-1)
        assert (here.get() == wanted).all()

    def test_stripes_between_processes(self) -> None:
        nbytes = 2 * MIB
        child = self.child(nbytes)
        near, here = self.open(), self.buffer(nbytes)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        dense, striped = stripes(num_tokens=4096, nbytes=256)
        local = (dense + here.region.address).astype(np.uint64)
        remote = (striped + child.region.address).astype(np.uint64)
        self.write(peer, Spans(local, remote, np.full(len(local), 256, np.uint64)))
        wanted = content(1, nbytes)
        wanted.reshape(-1, 2, 256)[:, 1] = here.get()[: nbytes // 2].reshape(-1, 256)
        assert child.ask(do="digest")["digest"] == hashlib.sha256(wanted.tobytes()).hexdigest()

    def test_the_far_side_is_killed_in_mid_transfer(self) -> None:
        nbytes = self.large
        child = self.child(nbytes)
        near, here = self.open(), self.buffer(nbytes)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        spans = one_span(here.region.address, child.region.address, nbytes)
        transfers = [peer.read(spans, timeout=self.timeout) for _ in range(20)]
        child.kill()
        started = time.monotonic()
        with raises(PeerLost, TransferTimeout):
            for transfer in transfers:
                transfer.wait()
            self.read(peer, spans)
        assert time.monotonic() - started < self.death_seconds
        peer.close()
        again = self.child(nbytes)
        peer = near.connect(again.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, again.region.address, nbytes))
        assert (here.get() == content(1, nbytes)).all()

    def test_the_near_side_is_killed_in_mid_transfer(self) -> None:
        nbytes = self.large
        near, here = self.open(), self.buffer(nbytes)
        key = near.register(here.region)
        child = self.child(nbytes)
        before = here.get()[:4096]
        child.tell(do="hammer", address=near.address.hex(), base=here.region.address, rounds=10000)
        deadline = time.monotonic() + self.timeout
        while (here.get()[:4096] == before).all():
            assert time.monotonic() < deadline, "the child never wrote"
        child.kill()
        if self.transport.stops_writes_on_failure:
            fresh = self.rng.integers(0, 256, nbytes, np.uint8)
            here.put(fresh)
            time.sleep(0.05)  # any remaining bytes of the dead writer would arrive now
            assert (here.get() == fresh).all()
        started = time.monotonic()
        near.revoke(key)
        assert time.monotonic() - started < self.death_seconds
        near.register(here.region)
        self._check_serves(near, here.region.address)

    def test_a_restarted_peer_on_the_same_port_is_another(self) -> None:
        first = self.child(MIB)
        near, here = self.open(), self.buffer(MIB)
        near.register(here.region)
        peer = near.connect(first.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, first.region.address, MIB))
        first.kill()
        second = self.child(MIB)
        assert second.address != first.address
        with raises(PeerLost, TransferTimeout):
            near.connect(first.address, timeout=self.timeout)
        with raises(PeerLost, TransferTimeout):
            self.read(peer, one_span(here.region.address, second.region.address, 64))
        peer = near.connect(second.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, second.region.address, MIB))

    def test_a_stopped_peer_costs_no_more_than_the_deadline(self) -> None:
        child = self.child(self.large)
        near, here = self.open(), self.buffer(self.large)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        child.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            spans = one_span(here.region.address, child.region.address, self.large)
            transfer = peer.read(spans, timeout=self.stopped_seconds)
            taken = time.monotonic() - started
            assert taken < 0.8 * self.stopped_seconds, "read() waited for the peer"
            failed = False
            try:
                transfer.wait()
            except TransferTimeout:
                failed = True
            assert time.monotonic() - started < 10 * self.stopped_seconds
            after = here.get()
        finally:
            child.signal(signal.SIGCONT)
        time.sleep(0.1)  # bytes that a timed-out transfer still moved would arrive now
        assert not failed or (here.get() == after).all()

    def test_a_stopped_peer_does_not_block_others(self) -> None:
        """Transfers with the stopped peer wait, transfers with the other complete, and a queued
        transfer can be waited for briefly, and cancelled immediately."""
        children = stopped, other = self.child(MIB), self.child(MIB)
        near, here = self.open(), self.buffer(2 * MIB)
        near.register(here.region)
        slow, peer = (near.connect(child.address, timeout=self.timeout) for child in children)
        base = here.region.address
        stopped.signal(signal.SIGSTOP)
        try:
            spans = one_span(base, stopped.region.address, MIB)
            waiting = [slow.read(spans, timeout=self.timeout) for _ in range(NUM_BUSY_TRANSFERS)]
            queued = slow.read(spans, timeout=self.timeout)
            self.read(peer, one_span(base + MIB, other.region.address, MIB))
            started = time.monotonic()
            with suppress(TransferTimeout):  # of this call alone; some transports need no peer
                queued.wait(0.01)
            queued.cancel()
            assert time.monotonic() - started < self.death_seconds
        finally:
            stopped.signal(signal.SIGCONT)
        for transfer in waiting:
            with suppress(TransferError):  # cancelling may have broken a connection they shared
                transfer.wait()
        assert (here.get()[MIB:] == content(1, MIB)).all()

    def test_connecting_to_a_stopped_peer_costs_no_more_than_the_timeout(self) -> None:
        child, near = self.child(MIB), self.open()
        child.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with raises(TransferTimeout, PeerLost):
                near.connect(child.address, timeout=0.3)
            assert time.monotonic() - started < 5
        finally:
            child.signal(signal.SIGCONT)
        near.connect(child.address, timeout=self.timeout).close()

    def test_no_leaks_after_close(self) -> None:
        self._one_round()
        before = leftovers()
        for _ in range(3):
            self._one_round()
        _assert_no_leaks(before)

    def test_no_leaks_after_a_kill(self) -> None:
        self._one_round()
        before = leftovers()
        for _ in range(2):
            with PeerProcess(self.loader, self.allocator, self.options(), MIB) as child:
                near = self.transport.open(self.options())
                here = self.buffer(MIB)
                near.register(here.region)
                peer = near.connect(child.address, timeout=self.timeout)
                self.read(peer, one_span(here.region.address, child.region.address, MIB))
                child.kill()
                with raises(TransferError):
                    for _ in range(3):
                        self.read(peer, one_span(here.region.address, child.region.address, MIB))
                near.close()
            self.stack.close()
        _assert_no_leaks(before)

    def test_a_departed_peer_leaks_nothing(self) -> None:
        child = self.child(MIB)
        self._visit(child)
        before: dict[str, Any] = {}
        for _ in range(5):
            self._visit(child)
            before = before or child.ask(do="descriptors")
        deadline = time.monotonic() + self.timeout
        while child.ask(do="descriptors") != before:
            assert time.monotonic() < deadline, "connections of departed peers stay open"
            time.sleep(0.01)

    def _visit(self, child: PeerProcess) -> None:
        near, here = self.transport.open(self.options()), self.buffer(4096)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, child.region.address, 4096))
        near.close()
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:  # the server notices on its own thread
            time.sleep(0.02)

    def _one_round(self) -> None:
        """Open, connect, move and close everything once, in this process and with a child."""
        with PeerProcess(self.loader, self.allocator, self.options(), MIB) as child:
            near = self.transport.open(self.options())
            here = self.buffer(MIB)
            near.register(here.region)
            peer = near.connect(child.address, timeout=self.timeout)
            self.read(peer, one_span(here.region.address, child.region.address, MIB))
            near.close()
        self.stack.close()

    def _check_serves(self, far: Endpoint, base: int) -> None:
        near, here = self.open(), self.buffer(MIB)
        near.register(here.region)
        peer = near.connect(far.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, base, MIB))


def _assert_no_leaks(before: Leftovers) -> None:
    deadline = time.monotonic() + 2  # the kernel removes a joined thread's entry with some delay
    while (after := leftovers(before.shared_memory)) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after == before, f"left open: {after}, before it was {before}"
