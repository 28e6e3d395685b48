"""Launches ranks on several nodes (``--nnodes``): node 0 runs some as its children, and waits for
the other nodes, whose ranks connect to it.

If a node is gone, or one of its ranks dies, the instance ends with the reason.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead, PortInUse
from mooncake_engine.execution.node_connections import (
    AuthenticatedListener,
    InstanceOver,
    KillRank,
    NodeHello,
    NodeReady,
    NodeRefused,
    NodeWelcome,
    RankEnded,
    RankHello,
    await_slow_reader,
    own_address,
    receive_message,
    send_message,
    shut_down,
)
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.execution.rank_launcher import (
    Rank,
    config_on_host,
    find_ports,
    start_local_ranks,
)
from mooncake_kv.errors import KVConfigError
from mooncake_kv.model_fingerprint import model_fingerprint

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 600.0
"""How long nodes wait for each other. It is long because hosts are started by hand or by a cluster
scheduler, and download the model first."""
_REMINDER_INTERVAL_S = 30.0
"""Interval of log lines about missing nodes."""
_HELLO_TIMEOUT_S = 10.0
"""How long a new connection may take to send its first message."""
_START_TIMEOUT_S = 60.0
"""How long to wait for each connection of a rank, and for each node to have started its ranks."""
_KILL_TIMEOUT_S = 5.0
"""How long to wait for the exit of a rank that is killed, or of a node."""


def weights_fingerprint(model: Path) -> str:
    """The fingerprint of a model's weights, by which nodes compare their copies.

    Raises:
        ConfigError: the model can't be read.
    """
    try:
        return model_fingerprint(model, "auto").weights
    except KVConfigError as exc:
        raise ConfigError(str(exc)) from exc


def engine_version() -> str:
    """The version of this package. All nodes must have the same, as they exchange pickles."""
    return importlib.metadata.version("mooncake-engine")


@dataclass(slots=True)
class JoinedNode:
    """Another node of the instance, as node 0 sees it; keeps how its ranks ended.

    Args:
        hello: the message with which it joined.
        control: connection to the node.

    Attributes:
        pids: process ids of its ranks, by rank.
        ports: free ports of its host, for the rendezvous of groups.
        rank_connections: the connections of its ranks.
    """

    hello: NodeHello
    control: Connection
    pids: dict[int, int] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    rank_connections: list[Connection] = field(default_factory=list)
    _ends: dict[int, str] = field(default_factory=dict)
    _gone: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def name(self) -> str:
        """Number and host of the node, for messages."""
        return f"node {self.hello.node} ({self.hello.host})"

    def receive_messages(self) -> None:
        """Receive the node's messages until it is gone. The main loop of a thread."""
        try:
            while True:
                message = receive_message(self.control)
                if isinstance(message, RankEnded):
                    with self._changed:
                        self._ends[message.rank] = message.how
                        self._changed.notify_all()
        except (EOFError, OSError) as exc:
            with self._changed:
                self._gone = f"{self.name} is gone: {str(exc) or 'its connection has ended'}"
                self._changed.notify_all()
        for connection in self.rank_connections:  # its ranks may still run: this makes them exit
            shut_down(connection)

    def exit_reason(self, rank: int) -> str | None:
        """How a rank ended; None while it runs."""
        with self._changed:
            return self._ends.get(rank) or self._gone or None

    def wait(self, rank: int, timeout_s: float) -> bool:
        """Wait for a rank to end; returns whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._gone) or rank in self._ends, timeout_s)

    def send_message(self, message: KillRank | InstanceOver) -> None:
        """Send a message to the node; does nothing if the node is gone."""
        with suppress(OSError):
            send_message(self.control, message)


class NodeRank(Rank):
    """A rank on another node.

    Args:
        rank: number of the rank.
        connections: its connections for orders and for messages.
        node: the node that it runs on.
        our_host: address of this node.
    """

    def __init__(
        self,
        rank: int,
        connections: tuple[Connection, Connection],
        node: JoinedNode,
        our_host: str,
    ) -> None:
        super().__init__(rank, *connections)
        self._node = node
        self._our_host = our_host

    @property
    def pid(self) -> int:
        return self._node.pids[self.rank]

    def adapt(self, config: EngineConfig) -> EngineConfig:
        """The config with the node's address and the paths of its copies of the models.

        Raises:
            ConfigError: see ``config_on_host``.
        """
        hello = self._node.hello
        config = config_on_host(config, self.rank, hello.host, self._our_host)
        speculation = config.speculative_config
        if speculation is not None and speculation.model is not None:
            speculation = replace(speculation, model=Path(hello.draft_model))
        return replace(config, model=Path(hello.model), speculative_config=speculation)

    def wait(self, timeout_s: float) -> bool:
        return self._node.wait(self.rank, timeout_s)

    def exit_reason(self) -> str:
        return self._node.exit_reason(self.rank) or "it exited"

    def kill(self) -> None:
        if self._node.exit_reason(self.rank) is None:
            self._node.send_message(KillRank(self.rank))
            self._node.wait(self.rank, _KILL_TIMEOUT_S)


class NodeLauncher:
    """Launches ranks as children of the nodes of an instance. This process is node 0.

    Args:
        config: config of the instance: the ranks, their threads, and the nodes.

    Raises:
        ConfigError: node 0 can't listen at ``--master-addr``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._infos = RankInfo.all_of(config)
        self._nodes: dict[int, JoinedNode] = {}
        self._rendezvous: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self._key = config.nodes.secret.encode()
        self._token = secrets.token_hex(16)
        self._weights = weights_fingerprint(config.model)
        self._listener = AuthenticatedListener(
            _listen(config.nodes.master_addr, config.nodes.master_port), self._key
        )
        self._scratch = tempfile.mkdtemp(prefix="mooncake-ranks-")
        # also if the process ends without ``close``
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self.threads = config.threads or max(1, torch.get_num_threads() // self._num_own)

    @property
    def _num_own(self) -> int:
        return self._config.num_ranks_per_node

    def start(self) -> Sequence[Rank]:
        """Wait for all nodes, and start all ranks; returns them in order, waiting for their first
        order.

        Raises:
            ConfigError: a node did not join in time.
            EngineDead: a node left before the ranks were started.
        """
        with closing(self._listener):
            self._await_nodes()
            connections = self._welcome()
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        our_host = own_address(nodes[0].control)
        self._choose_rendezvous(our_host)
        ranks = start_local_ranks(self._num_own)
        for node in nodes:
            node.rank_connections += [end for rank in node.pids for end in connections[rank]]
            name = f"node-{node.hello.node}"
            self._threads.append(
                threading.Thread(target=node.receive_messages, name=name, daemon=True)
            )
            self._threads[-1].start()
            ranks += [NodeRank(rank, connections[rank], node, our_host) for rank in node.pids]
            logger.info("%s runs ranks %s", node.name, ", ".join(map(str, node.pids)))
        return ranks

    def rendezvous(self, name: str) -> str:
        return self._rendezvous[name]

    def close(self) -> None:
        self._listener.close()
        for node in self._nodes.values():
            node.send_message(InstanceOver())
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        for thread in self._threads:  # it ends when the node has closed its connection
            thread.join(max(0.0, deadline - time.monotonic()))
        for node in self._nodes.values():
            shut_down(node.control)
        for thread in self._threads:
            thread.join()
        for node in self._nodes.values():
            node.control.close()
        self._remove()

    def _await_nodes(self) -> None:
        wanted, nodes = self._config.nodes, self._nodes
        where = f"{wanted.master_addr}:{wanted.master_port}"
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while missing := sorted(set(range(1, wanted.nnodes)) - nodes.keys()):
            names = ", ".join(map(str, missing))
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConfigError(
                    f"node {names} of {wanted.nnodes} did not join at {where} within "
                    f"{JOIN_TIMEOUT_S:g} s: start serve with --node-rank {missing[0]} there, or "
                    "check its log for the reason"
                )
            try:
                self._admit(self._listener.accept(min(left, _REMINDER_INTERVAL_S)))
            except TimeoutError:
                logger.info("waiting at %s for node %s of %d", where, names, wanted.nnodes)

    def _admit(self, connection: Connection) -> None:
        """Receive a node's hello, and accept the node or tell it why it is rejected."""
        try:
            hello = receive_message(connection, _HELLO_TIMEOUT_S)
            if not isinstance(hello, NodeHello):
                connection.close()
                return
            reason = self._rejection_reason(hello)
            if reason:
                logger.warning("rejected node %d (%s): %s", hello.node, hello.host, reason)
                send_message(connection, NodeRefused(reason))
                connection.close()
                return
        except (EOFError, OSError) as exc:
            logger.warning("a node disconnected while it was joining: %s", exc)
            connection.close()
            return
        earlier = self._nodes.pop(hello.node, None)
        if earlier is not None:
            earlier.control.close()
        self._nodes[hello.node] = JoinedNode(hello, connection)
        logger.info("node %d of %d has joined from %s", hello.node, hello.num_nodes, hello.host)

    def _rejection_reason(self, hello: NodeHello) -> str:
        """Why a node can't join; empty if it can."""
        config = self._config
        compared = {
            "versions of mooncake-engine": (hello.version, engine_version()),
            "values of --nnodes": (hello.num_nodes, config.nodes.nnodes),
            "numbers of ranks": (hello.num_ranks, config.num_all_ranks),
            "copies of the model": (hello.weights, self._weights),
        }
        for what, (theirs, ours) in compared.items():
            if theirs != ours:
                return f"{what} differ: {ours} on node 0, {theirs} on node {hello.node}"
        if not 0 < hello.node < config.nodes.nnodes:
            return f"--node-rank must be from 1 to {config.nodes.nnodes - 1}, got {hello.node}"
        known = self._nodes.get(hello.node)
        if known is not None and not known.control.poll():  # poll() is true if it has been closed
            return f"another host has joined as node {hello.node}: {known.hello.host}"
        return ""

    def _welcome(self) -> dict[int, tuple[Connection, Connection]]:
        """Have all nodes start their ranks; returns the connections by rank: orders, messages."""
        num_ports = Counter(self._leading_nodes().values())
        for number, node in self._nodes.items():
            ranks = tuple(self._config.nodes.ranks_of(number, len(self._infos)))
            try:
                send_message(node.control, NodeWelcome(self._token, ranks, num_ports[number]))
            except OSError as exc:
                raise EngineDead(
                    f"{node.name} disconnected before all nodes had joined: {exc}"
                ) from exc
        connections = self._accept_ranks(len(self._infos) - self._num_own)
        for number, node in self._nodes.items():
            try:
                ready = receive_message(node.control, _START_TIMEOUT_S)
            except (EOFError, OSError) as exc:
                raise EngineDead(f"{node.name} could not start its ranks: {exc}") from exc
            assert isinstance(ready, NodeReady), f"a node that starts ranks says {ready}"
            ranks = tuple(self._config.nodes.ranks_of(number, len(self._infos)))
            node.pids = dict(zip(ranks, ready.pids, strict=True))
            node.ports = list(ready.ports)
        return connections

    def _accept_ranks(self, count: int) -> dict[int, tuple[Connection, Connection]]:
        """Accept the connections of this many ranks: for each rank, its orders and its messages.

        Raises:
            EngineDead: for ``_START_TIMEOUT_S`` no connection of a rank came, whatever else did.
        """
        ends: dict[tuple[int, bool], Connection] = {}
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(ends) < 2 * count:
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError("only others connected")
                connection = self._listener.accept(left)
            except TimeoutError as exc:
                raise EngineDead(
                    f"ranks of the other nodes did not connect within {_START_TIMEOUT_S:g} s; "
                    "the nodes' logs say why"
                ) from exc
            try:
                hello = receive_message(connection, min(left, _HELLO_TIMEOUT_S))
            except (EOFError, OSError):
                connection.close()
                continue
            if not isinstance(hello, RankHello) or hello.token != self._token:
                connection.close()  # from a rejected node, or from an earlier start of the instance
                continue
            end = hello.rank, hello.is_orders
            if end not in ends:
                deadline = time.monotonic() + _START_TIMEOUT_S
            if hello.is_orders:
                await_slow_reader(connection)
            ends[end] = connection
        return {rank: (ends[rank, True], ends[rank, False]) for rank, _ in ends}

    def _leading_nodes(self) -> dict[str, int]:
        """By name of each group whose ranks are on several nodes, the node of its first rank."""
        members: dict[str, list[int]] = {}
        for info in self._infos:
            for name in info.group_names:
                members.setdefault(name, []).append(info.number // self._num_own)
        return {name: nodes[0] for name, nodes in members.items() if len(set(nodes)) > 1}

    def _choose_rendezvous(self, our_host: str) -> None:
        """Choose the rendezvous of each group: a port on the host of its first rank, or, if all its
        ranks are on one host, a file, which no other process can take before the ranks use it. The
        host in a file's URL makes the group communicate over loopback."""
        leading = self._leading_nodes()
        ports = {number: list(node.ports) for number, node in self._nodes.items()}
        ports[0] = find_ports(our_host, list(leading.values()).count(0))
        hosts = {number: node.hello.host for number, node in self._nodes.items()} | {0: our_host}
        scratch = {number: node.hello.scratch for number, node in self._nodes.items()}
        scratch[0] = self._scratch
        for info in self._infos:
            for name in info.group_names:
                own = info.number // self._num_own
                self._rendezvous.setdefault(name, f"file://127.0.0.1{scratch[own]}/{name}")
        for name, node in leading.items():
            host = f"[{hosts[node]}]" if ":" in hosts[node] else hosts[node]
            self._rendezvous[name] = f"tcp://{host}:{ports[node].pop()}"


def _listen(host: str, port: int) -> socket.socket:
    """Listen for the other nodes.

    Raises:
        PortInUse: another process listens there.
        ConfigError: there is no such address.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"--master-addr {host} is not an address: {exc}") from exc
    listener = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address[4])
        except OSError as exc:
            if exc.errno != errno.EADDRNOTAVAIL:
                raise
            # a name that resolves to this host only for others, such as a Kubernetes service
            listener.bind(("::" if address[0] == socket.AF_INET6 else "0.0.0.0", port))
        listener.listen()
    except OSError as exc:
        listener.close()
        kind = PortInUse if exc.errno == errno.EADDRINUSE else ConfigError
        raise kind(
            f"node 0 can't listen for the other nodes at {host}:{port}: {exc}; choose another "
            "--master-port on every node"
        ) from exc
    return listener
