"""The executor's side of rank processes: launches them, talks to them and ends them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from ipaddress import ip_address
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Protocol

import torch

from mooncake_engine.config import EngineConfig, ExecutorKind
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.rank_process import RankConnections, fork_ranks
from mooncake_engine.process.forked_process import ForkedProcess, adopting
from mooncake_hal.command_line import describe_exit, import_path

_END_TIMEOUT_S = 1.0
"""How long a process may take to exit after it has closed its connection."""


class Rank(ABC):
    """The executor's side of one rank process, on any host.

    Args:
        rank: number of the rank.
        orders: carries orders to the rank and its reports back, one at a time.
        messages: carries extension messages both ways at any time.
    """

    def __init__(self, rank: int, orders: Connection, messages: Connection) -> None:
        self.rank = rank
        self.orders = orders
        self.messages = messages
        self.failed: wire.RankFailed | None = None
        self._lock = threading.Lock()

    def send_order(self, encoded: bytes) -> None:
        """Send an order. If the rank is gone, that is noticed when its report is read."""
        with suppress(OSError):
            self.orders.send_bytes(encoded)

    def receive_report(self) -> wire.Report | None:
        """Read one report; None if the rank is gone."""
        try:
            report: wire.Report = wire.decode_report(self.orders.recv_bytes())
        except (EOFError, OSError):  # a host that has vanished: ETIMEDOUT or EHOSTUNREACH
            return None
        if isinstance(report, wire.RankFailed):
            self.failed = report
        return report

    def send(self, message: bytes) -> None:
        """Send a message to the rank's extension."""
        with self._lock:
            self.messages.send_bytes(message)

    def has_vanished(self) -> bool:
        """Whether the process ended without reporting why. Reads the reports that it has sent."""
        while self.failed is None and self.orders.poll():
            if self.receive_report() is None:
                return True
        return self.failed is None and self.wait(0.0)

    def is_frozen(self) -> bool:
        """Whether the process is stopped by a signal or a debugger; False if that is not known."""
        return False

    def describe_end(self) -> str:
        """Why the rank ended, for messages."""
        if self.failed is not None:
            return f"{self.failed.kind}: {self.failed.reason}"
        if not self.wait(_END_TIMEOUT_S):
            return "it closed its connection"
        return self.exit_reason()

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
        """The instance's config, adapted to the rank's host."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to exit; returns whether it has."""

    @abstractmethod
    def exit_reason(self) -> str:
        """How the process ended, for messages. Call only after it has."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and reap it."""


class Launcher(Protocol):
    """Starts the ranks of one instance."""

    def start(self) -> Sequence[Rank]:
        """Start all ranks; returns them in order, waiting for their first order.

        Raises:
            ConfigError: the ranks can't be started with this config.
        """
        ...

    def rendezvous(self, name: str) -> str:
        """The URL at which the ranks of a group (see ``RankInfo.group_names``) find each other.
        Known once the ranks are started."""
        ...

    @property
    def threads(self) -> int:
        """CPU threads per rank."""
        ...

    def close(self) -> None:
        """Free the launcher's resources. Call after the ranks have ended."""
        ...


def config_on_host(config: EngineConfig, rank: int, host: str, our_host: str) -> EngineConfig:
    """Replace the KV addresses of an instance's config by those of a rank's host, as the rank's
    transports listen there.

    Args:
        config: the config on this host.
        rank: number of the rank, for the error message.
        host: address of the rank's host.
        our_host: address of this host.

    Raises:
        ConfigError: the config has a loopback address for KV, and the rank is on another host.
    """
    kv = config.kv_transfer
    if kv is None or host == our_host:
        return config
    address = kv.advertise_host or kv.host
    if ip_address(address).is_loopback:
        raise ConfigError(
            f"rank {rank} is on {host}, where peers can't reach --kv-host {address}: give the "
            "address of this host in their network"
        )
    there = replace(
        kv, host=kv.host if ip_address(kv.host).is_unspecified else host, advertise_host=host
    )
    return replace(config, kv_transfer=there)


def find_ports(host: str, count: int) -> list[int]:
    """Find ``count`` free TCP ports of this host."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def start_rank_processes(ends: Sequence[RankConnections]) -> list[ForkedProcess]:
    """Start a process per rank, which inherits its ends; they are closed in this process.

    One child process imports what all ranks need and forks them, so that the imports cost time and
    memory only once.

    Raises:
        EngineDead: the ranks can't be started; the child's log says why.
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
        forker.wait()  # once it has exited, the ranks are children of this process
    return [ForkedProcess(int(pid)) for pid in found]


def start_forker(descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the child process that forks the ranks and exits; see ``rank_process.main``.

    Args:
        descriptors: the file descriptors to pass to it, in the order of its arguments.
    """
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.rank_process", *map(str, descriptors)],
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": import_path()},
        stdin=subprocess.DEVNULL,
    )


def describe_process_end(status: int) -> str:
    """How a rank's process ended, for messages."""
    end = describe_exit(status)
    return end if status < 0 else f"{end}; its log says why"


class LocalRank(Rank):
    """A rank that is a child of this process.

    Args:
        rank: number of the rank.
        ends: this process's ends of its connections.
        process: the rank's process.
    """

    def __init__(self, rank: int, ends: RankConnections, process: ForkedProcess) -> None:
        super().__init__(rank, *ends)
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_frozen(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # the system has no /proc, or the process has ended
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

    def exit_reason(self) -> str:
        return describe_process_end(self._process.wait())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_local_ranks(count: int) -> list[Rank]:
    """Start the first ``count`` ranks of an instance as children of this process.

    Raises:
        EngineDead: the ranks can't be started; the log says why.
    """
    ours, theirs = RankConnections.pipes(count)
    return _local_ranks(ours, start_rank_processes(theirs))


def fork_local_ranks(count: int, others: Sequence[Connection]) -> list[Rank]:
    """As ``start_local_ranks``, but fork the ranks from this process, which must have a single
    thread and has imported what they need.

    Args:
        count: number of ranks.
        others: connections of this process, which the ranks close.
    """
    ours, theirs = RankConnections.pipes(count)
    pids = fork_ranks(theirs, [*others, *(end for pair in ours for end in pair)])
    for pair in theirs:
        pair.close()
    return _local_ranks(ours, [ForkedProcess(pid) for pid in pids])


def _local_ranks(ends: Sequence[RankConnections], processes: Sequence[ForkedProcess]) -> list[Rank]:
    pairs = zip(ends, processes, strict=True)
    return [LocalRank(rank, ours, process) for rank, (ours, process) in enumerate(pairs)]


def has_local_ranks(config: EngineConfig) -> bool:
    """Whether an instance's ranks are separate processes, all on this host."""
    is_here = config.executor is not ExecutorKind.RAY and config.nodes.nnodes == 1
    return is_here and config.num_all_ranks > 1


class LocalLauncher:
    """Launches ranks as children of this process.

    Args:
        config: config of the instance: the number of ranks, and their threads.
        ranks: the ranks, if they are forked already.
    """

    def __init__(self, config: EngineConfig, ranks: Sequence[Rank] = ()) -> None:
        self._count = config.num_all_ranks
        self._ranks = ranks
        self._scratch = Path(tempfile.mkdtemp(prefix="mooncake-ranks-"))
        # also if the process ends without ``close``
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self.threads = config.threads or max(1, torch.get_num_threads() // self._count)

    def rendezvous(self, name: str) -> str:
        """A file rather than a port, which another process could take before the ranks use it. The
        host in the URL makes the groups communicate over loopback."""
        return f"file://127.0.0.1{self._scratch / name}"

    def start(self) -> Sequence[Rank]:
        return self._ranks or start_local_ranks(self._count)

    def close(self) -> None:
        self._remove()
