"""The executor's side of ranks in processes of their own: two connections and a way to end one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_address
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Protocol

import torch

from mooncake_engine.config import EngineConfig, ExecutorKind
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.rank_process import RankEnds, fork_ranks
from mooncake_engine.process.forked_process import ForkedProcess, adopting
from mooncake_hal.command_line import describe_exit, import_path

_END_TIMEOUT_S = 1.0
"""How long a process may take to end after its connection has."""


class Rank(ABC):
    """The parent's side of one rank, wherever it runs.

    Args:
        rank: which.
        orders: carries orders to it and its reports back, one at a time.
        messages: carries extension messages both ways at any time.
    """

    def __init__(self, rank: int, orders: Connection, messages: Connection) -> None:
        self.rank = rank
        self.orders = orders
        self.messages = messages
        self.failed: wire.RankFailed | None = None
        self._lock = threading.Lock()

    def order(self, encoded: bytes) -> None:
        """Send an order; a rank that is gone shows when its report is read."""
        try:
            self.orders.send_bytes(encoded)
        except ConnectionError:
            return

    def report(self) -> wire.Report | None:
        """Read one report; None if the rank is gone."""
        try:
            report: wire.Report = wire.decode_report(self.orders.recv_bytes())
        except (EOFError, ConnectionError):
            return None
        if isinstance(report, wire.RankFailed):
            self.failed = report
        return report

    def send(self, message: bytes) -> None:
        """Send a message to the rank's extension."""
        with self._lock:
            self.messages.send_bytes(message)

    def has_vanished(self) -> bool:
        """Whether the process ended without saying why; what it said last is read for that."""
        while self.failed is None and self.orders.poll():
            if self.report() is None:
                return True
        return self.failed is None and self.wait(0.0)

    def is_frozen(self) -> bool:
        """Whether its process is stopped by a signal or a debugger, as far as can be seen."""
        return False

    def describe_end(self) -> str:
        """Why the rank ended, in words."""
        if self.failed is not None:
            return f"{self.failed.kind}: {self.failed.reason}"
        if not self.wait(_END_TIMEOUT_S):
            return "it closed its connection"
        return self.last_words()

    def close(self) -> None:
        """Close both connections."""
        self.orders.close()
        self.messages.close()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id, on the rank's host."""

    @abstractmethod
    def adapt(self, config: EngineConfig) -> EngineConfig:
        """The instance's config as it must read on the rank's host."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for the process's end; returns whether it came."""

    @abstractmethod
    def last_words(self) -> str:
        """How a process that has ended did so."""

    @abstractmethod
    def kill(self) -> None:
        """End the process now, and reap it."""


class Launcher(Protocol):
    """Starts the ranks of one instance."""

    def start(self) -> Sequence[Rank]:
        """All ranks, in order; they wait for their first order.

        Raises:
            ConfigError: they can't be started so.
        """
        ...

    def rendezvous(self, name: str) -> str:
        """Where the ranks of the group of that name meet (``RankInfo``); known once they are
        started."""
        ...

    @property
    def threads(self) -> int:
        """CPU threads for each rank."""
        ...

    def close(self) -> None:
        """Free what the launcher holds; the ranks have ended."""
        ...


def config_on_host(config: EngineConfig, rank: int, host: str, our_host: str) -> EngineConfig:
    """An instance's config with addresses of the host that a rank is on: transports listen there.

    Args:
        config: as this host has it.
        rank: which, for the message.
        host: address of the rank's host.
        our_host: address of this one.

    Raises:
        ConfigError: KV is to move by loopback, and the rank is on another host.
    """
    kv = config.kv_transfer
    if kv is None or host == our_host:
        return config
    told = kv.advertise_host or kv.host
    if ip_address(told).is_loopback:
        raise ConfigError(
            f"rank {rank} is on {host}, where peers can't reach --kv-host {told}: give the address "
            "of this host in their network"
        )
    there = replace(
        kv, host=kv.host if ip_address(kv.host).is_unspecified else host, advertise_host=host
    )
    return replace(config, kv_transfer=there)


def find_ports(host: str, count: int) -> list[int]:
    """``count`` free ports of this host."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def start_rank_processes(ends: Sequence[RankEnds]) -> list[ForkedProcess]:
    """A process for each rank at its ends, which are closed here.

    One child imports what all of them need and forks them, so that this costs its time and its
    memory once.

    Raises:
        EngineDead: they can't be started; the child's log says why.
    """
    pids, pids_to = Pipe(duplex=False)
    descriptors = [pids_to.fileno(), *(end.fileno() for pair in ends for end in pair)]
    with pids, adopting():
        forker = start_forker(descriptors)
        pids_to.close()
        for pair in ends:
            pair.close()
        try:
            found = pids.recv_bytes().split()
        except EOFError:
            how = describe_process_end(forker.wait())
            raise EngineDead(f"the process that starts the ranks {how}") from None
        forker.wait()  # they are ours now
    return [ForkedProcess(int(pid)) for pid in found]


def start_forker(descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """The child that forks the ranks which have these ends, and ends; see ``rank_process.main``."""
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.rank_process", *map(str, descriptors)],
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": import_path()},
        stdin=subprocess.DEVNULL,
    )


def describe_process_end(status: int) -> str:
    """How a rank's process ended, in words."""
    end = describe_exit(status)
    return end if status < 0 else f"{end}; its log says why"


class LocalRank(Rank):
    """A child process of this one.

    Args:
        rank: which.
        ends: ours.
        process: its own.
    """

    def __init__(self, rank: int, ends: RankEnds, process: ForkedProcess) -> None:
        super().__init__(rank, *ends)
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_frozen(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # another system, or it has ended
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def adapt(self, config: EngineConfig) -> EngineConfig:
        return config

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        return describe_process_end(self._process.wait())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_local_ranks(count: int) -> list[Rank]:
    """The first ``count`` ranks of an instance, as children of this process.

    Raises:
        EngineDead: they can't be started; their log says why.
    """
    ours, theirs = RankEnds.pipes(count)
    return _local_ranks(ours, start_rank_processes(theirs))


def fork_local_ranks(count: int, others: Sequence[Connection]) -> list[Rank]:
    """The same, forked from this process, which must have a single thread yet: what they need is
    imported here.

    Args:
        count: how many.
        others: connections of this process, which ranks do not keep.
    """
    ours, theirs = RankEnds.pipes(count)
    pids = fork_ranks(theirs, [*others, *(end for pair in ours for end in pair)])
    for pair in theirs:
        pair.close()
    return _local_ranks(ours, [ForkedProcess(pid) for pid in pids])


def _local_ranks(ends: Sequence[RankEnds], processes: Sequence[ForkedProcess]) -> list[Rank]:
    pairs = zip(ends, processes, strict=True)
    return [LocalRank(rank, ours, process) for rank, (ours, process) in enumerate(pairs)]


def has_local_ranks(config: EngineConfig) -> bool:
    """Whether an instance's ranks are processes of their own, all of them on its own host."""
    is_here = config.executor is not ExecutorKind.RAY and config.nodes.nnodes == 1
    return is_here and config.num_all_ranks > 1


class LocalLauncher:
    """Ranks as children of this process.

    Args:
        config: says how many, and their threads.
        ranks: they themselves, if they are forked already.
    """

    def __init__(self, config: EngineConfig, ranks: Sequence[Rank] = ()) -> None:
        self._count = config.num_all_ranks
        self._ranks = ranks
        self._scratch = Path(tempfile.mkdtemp(prefix="mooncake-ranks-"))
        self.threads = config.threads or max(1, torch.get_num_threads() // self._count)

    def rendezvous(self, name: str) -> str:
        """A file and not a port, which another process could take in between; the host makes
        groups use loopback."""
        return f"file://127.0.0.1{self._scratch / name}"

    def start(self) -> Sequence[Rank]:
        return self._ranks or start_local_ranks(self._count)

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
