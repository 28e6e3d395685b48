"""A node that joins an instance (``--node-rank`` 1 and above): runs ranks that node 0 drives."""

from __future__ import annotations

import logging
import signal
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from types import FrameType

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.node_connections import (
    InstanceOver,
    KillRank,
    NodeHello,
    NodeReady,
    NodeRefused,
    NodeWelcome,
    RankEnded,
    RankHello,
    await_slow_reader,
    connect_authenticated,
    own_address,
    receive_message,
    send_message,
)
from mooncake_engine.execution.node_launcher import (
    JOIN_TIMEOUT_S,
    engine_version,
    weights_fingerprint,
)
from mooncake_engine.execution.rank_launcher import (
    describe_process_end,
    find_ports,
    start_rank_processes,
)
from mooncake_engine.execution.rank_process import RankConnections
from mooncake_engine.process.forked_process import ForkedProcess

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Interval of attempts to connect to node 0."""
_REMINDER_INTERVAL_S = 30.0
"""Interval of log lines while node 0 can't be reached."""
_POLL_INTERVAL_S = 0.1
"""Interval of checks for signals and for ranks that have exited."""
_END_TIMEOUT_S = 5.0
"""How long ranks may take to exit after node 0 has ended the instance, before they are killed."""


def run_node(config: EngineConfig, shutdown_timeout_s: float) -> None:
    """Join the instance, and run this node's ranks until node 0 ends the instance. After SIGTERM or
    SIGINT node 0 has ``shutdown_timeout_s`` to do so; a second signal ends this node at once.

    Raises:
        ConfigError: node 0 can't be reached, or rejects this node.
        EngineDead: node 0 is gone.
    """
    with (
        _Stop(shutdown_timeout_s) as stop,
        TemporaryDirectory(prefix="mooncake-ranks-", ignore_cleanup_errors=True) as scratch,
    ):
        node = _Node(config, stop, scratch)
        try:
            node.run()
        finally:
            node.close()


class _Stop:
    """Handles SIGTERM and SIGINT while it is entered: keeps the deadline by which to exit."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> _Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() has returned

    @property
    def is_requested(self) -> bool:
        """Whether a signal was received."""
        return self._deadline is not None

    @property
    def is_due(self) -> bool:
        """Whether this node must exit now, whatever node 0 does."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._deadline = now if self.is_requested else now + self._timeout_s


class _Node:
    """This host's part of an instance: its connection to node 0, and its ranks."""

    def __init__(self, config: EngineConfig, stop: _Stop, scratch: str) -> None:
        self._config = config
        self._stop = stop
        self._scratch = scratch
        self._nodes = config.nodes
        self._address = (config.nodes.master_addr, config.nodes.master_port)
        self._name = f"node 0 at {config.nodes.master_addr}:{config.nodes.master_port}"
        self._key = config.nodes.secret.encode()
        self._processes: dict[int, ForkedProcess] = {}
        self._control: Connection | None = None

    def run(self) -> None:
        """Join, start the ranks, and follow node 0 until the instance ends."""
        weights = weights_fingerprint(self._config.model)
        control = self._control = self._connect()
        if control is None:
            return
        try:
            send_message(control, self._hello(weights, own_address(control)))
            welcome = self._await_welcome(control)
            if welcome is None:
                return
            self._start_ranks(control, welcome)
            self._follow(control)
        except (EOFError, OSError) as exc:
            how = str(exc) or "its connection has ended"
            raise EngineDead(f"{self._name} is gone: {how}; this node's ranks exit") from exc

    def close(self) -> None:
        """Kill this node's ranks. Idempotent."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        if self._control is not None:
            self._control.close()

    def _connect(self) -> Connection | None:
        """Connect to node 0, retrying until it listens; None if a signal comes first."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        remind_at = time.monotonic() + _REMINDER_INTERVAL_S
        while not self._stop.is_requested:
            try:
                return connect_authenticated(self._address, self._key)
            except AuthenticationError as exc:
                raise ConfigError(
                    f"{self._name} has a different secret: give both the same --node-secret-file"
                ) from exc
            except (EOFError, OSError, UnicodeError) as exc:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{self._name} could not be reached for {JOIN_TIMEOUT_S:g} s: {exc}; start "
                        "serve there with --node-rank 0, or correct --master-addr, --master-port"
                    ) from exc
                if time.monotonic() >= remind_at:
                    remind_at += _REMINDER_INTERVAL_S
                    logger.info("waiting for %s: %s", self._name, exc)
            time.sleep(_RETRY_S)
        return None

    def _hello(self, weights: str, host: str) -> NodeHello:
        config = self._config
        speculation = config.speculative_config
        draft = None if speculation is None else speculation.model
        return NodeHello(
            node=self._nodes.node_rank,
            num_nodes=self._nodes.nnodes,
            num_ranks=config.num_all_ranks,
            version=engine_version(),
            weights=weights,
            model=str(config.model.resolve()),
            draft_model="" if draft is None else str(draft.resolve()),
            host=host,
            scratch=self._scratch,
        )

    def _await_welcome(self, control: Connection) -> NodeWelcome | None:
        """Wait until all nodes have joined; returns the ranks to start, or None if a signal comes
        first."""
        while not control.poll(_POLL_INTERVAL_S):
            if self._stop.is_requested:
                return None
        message = receive_message(control)
        if isinstance(message, NodeRefused):
            raise ConfigError(f"{self._name} rejected this node: {message.reason}")
        if not isinstance(message, NodeWelcome):
            raise EngineDead(f"{self._name} shut down before all nodes had joined")
        return message

    def _start_ranks(self, control: Connection, welcome: NodeWelcome) -> None:
        ends = [
            RankConnections(
                self._connect_rank(welcome.token, rank, is_orders=True),
                self._connect_rank(welcome.token, rank, is_orders=False),
            )
            for rank in welcome.ranks
        ]
        self._processes = dict(zip(welcome.ranks, start_rank_processes(ends), strict=True))
        ports = find_ports(own_address(control), welcome.num_ports)
        pids = tuple(process.pid for process in self._processes.values())
        send_message(control, NodeReady(pids, tuple(ports)))
        logger.info(
            "node %d of %d runs ranks %s",
            self._nodes.node_rank,
            self._nodes.nnodes,
            ", ".join(map(str, welcome.ranks)),
        )

    def _connect_rank(self, token: str, rank: int, *, is_orders: bool) -> Connection:
        connection = connect_authenticated(self._address, self._key)
        send_message(connection, RankHello(token, rank, is_orders))
        if is_orders:
            await_slow_reader(connection)
        return connection

    def _follow(self, control: Connection) -> None:
        """Report rank exits to node 0, and kill ranks at its request, until the instance ends."""
        living = dict(self._processes)
        while not self._stop.is_due:
            if control.poll(_POLL_INTERVAL_S):
                message = receive_message(control)
                if isinstance(message, InstanceOver):
                    self._await_ends()
                    return
                if isinstance(message, KillRank) and message.rank in living:
                    living[message.rank].kill()
            for rank, process in list(living.items()):
                if process.poll() is not None:
                    del living[rank]
                    send_message(control, RankEnded(rank, describe_process_end(process.wait())))
        logger.warning("node 0 did not end the instance in time: this node exits")

    def _await_ends(self) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_INTERVAL_S)
