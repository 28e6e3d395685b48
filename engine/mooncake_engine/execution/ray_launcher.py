"""Launches ranks on a Ray cluster: one actor per rank, which connects back to the executor.

Ray places the processes and ends them. Orders, steps and messages go over the executor's own
connections, authenticated by a key that is sent only to the actors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.node_connections import (
    AuthenticatedListener,
    RankHello,
    await_slow_reader,
    connect_authenticated,
    receive_message,
    send_message,
)
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.execution.rank_launcher import Rank, config_on_host, find_ports
from mooncake_hal.command_line import import_path

logger = logging.getLogger(__name__)

_PLACE_TIMEOUT_S = 60.0
"""How long Ray may take to reserve resources for all ranks."""
_START_TIMEOUT_S = 300.0
"""How long the actors may take to start, on hosts that may have to import everything first."""
_CONNECT_TIMEOUT_S = 60.0
"""How long an actor may take to connect to the executor."""
_KEY_BYTES = 32


class RankActor:
    """The class of a rank's Ray actor; its methods run on the rank's host."""

    def describe(self) -> tuple[str, int]:
        """The host's address, and the actor's process id."""
        return _ray().util.get_node_ip_address(), os.getpid()

    def find_ports(self, count: int) -> list[int]:
        """Find ``count`` free ports of the host."""
        return find_ports(_ray().util.get_node_ip_address(), count)

    def serve(self, address: tuple[str, int], key: bytes, rank: int) -> int:
        """Connect to the executor and run a rank until it is stopped; returns its exit status."""
        orders, messages = (connect_authenticated(address, key) for _ in range(2))
        send_message(orders, RankHello("", rank, True))
        send_message(messages, RankHello("", rank, False))
        await_slow_reader(orders)
        from mooncake_engine.execution.rank_process import ignore_sigterm, serve

        return serve(orders, messages, ignore_sigterm)


@dataclasses.dataclass(frozen=True, slots=True)
class RankLocation:
    """The process that a rank runs in.

    Args:
        host: address of the rank's host.
        our_host: address of the executor's host.
        pid: process id on the rank's host.
    """

    host: str
    our_host: str
    pid: int


class RayRank(Rank):
    """A rank in a Ray actor.

    Args:
        rank: number of the rank.
        connections: its connections for orders and for messages.
        actor: handle of the actor.
        running: object reference of the result of the actor's ``serve``.
        location: host and process of the rank.
    """

    def __init__(
        self,
        rank: int,
        connections: tuple[Connection, Connection],
        actor: Any,
        running: Any,
        location: RankLocation,
    ) -> None:
        super().__init__(rank, *connections)
        self._actor = actor
        self._running = running
        self._location = location

    @property
    def pid(self) -> int:
        return self._location.pid

    def adapt(self, config: EngineConfig) -> EngineConfig:
        """The config with the KV addresses of the rank's host.

        Raises:
            ConfigError: see ``config_on_host``.
        """
        return config_on_host(config, self.rank, self._location.host, self._location.our_host)

    def wait(self, timeout_s: float) -> bool:
        ray = _ray()
        done, _ = ray.wait([self._running], timeout=timeout_s)
        return bool(done)

    def exit_reason(self) -> str:
        ray = _ray()
        try:
            status = ray.get(self._running, timeout=_CONNECT_TIMEOUT_S)
        except ray.exceptions.RayError as exc:
            return " ".join(str(exc).split())
        return f"exited with status {status}; its log says why"

    def kill(self) -> None:
        ray = _ray()
        ray.kill(self._actor, no_restart=True)


class RayLauncher:
    """Launches ranks as actors of a Ray cluster, packed onto as few hosts as possible. If there are
    several data-parallel ranks, the tensor-parallel ranks of each stage are on one host.

    Args:
        config: config of the instance: the ranks, their threads, and the address of the cluster.
        resource: Ray's name of the device that each rank needs; empty if it needs only CPUs.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, config: EngineConfig, resource: str = "") -> None:
        ray = _connect(config.ray_address)
        self.threads = config.threads or 1
        self._rank_infos = RankInfo.all_of(config)
        self._rendezvous: dict[str, str] = {}
        devices = {resource: 1.0} if resource else {}
        self._bundle = {"CPU": float(self.threads), **devices}
        self._ranks_per_bundle = config.tp_size if config.dp_size > 1 else 1
        bundle = {name: amount * self._ranks_per_bundle for name, amount in self._bundle.items()}
        self._placement_group = ray.util.placement_group(
            [bundle] * (config.num_all_ranks // self._ranks_per_bundle), strategy="PACK"
        )
        self._key = secrets.token_bytes(_KEY_BYTES)

    def start(self) -> Sequence[Rank]:
        """Start all ranks; returns them in order, waiting for their first order.

        Raises:
            ConfigError: the cluster lacks resources.
            EngineDead: an actor died before it connected.
        """
        ray = _ray()
        if not self._placement_group.wait(_PLACE_TIMEOUT_S):
            together, remedy = "", "add hosts or free some"
            if self._ranks_per_bundle > 1:
                together = f", {self._ranks_per_bundle} of them on one host each"
                remedy += ", or lower tp_size"
            raise ConfigError(
                f"the Ray cluster lacks resources for {len(self._rank_infos)} ranks of "
                f"{self._bundle}{together}, it has {ray.cluster_resources()}: {remedy}"
            )
        actors = [self._actor(info.number) for info in self._rank_infos]
        try:
            described = ray.get(
                [actor.describe.remote() for actor in actors], timeout=_START_TIMEOUT_S
            )
            self._choose_rendezvous(actors, [host for host, _ in described])
        except ray.exceptions.RayError as exc:
            raise EngineDead(f"Ray could not start the ranks: {exc}") from exc
        our_host = ray.util.get_node_ip_address()
        listening = socket.create_server((our_host, 0))
        address = listening.getsockname()[:2]
        with contextlib.closing(AuthenticatedListener(listening, self._key)) as listener:
            ranks = []
            for rank, (actor, (host, pid)) in enumerate(zip(actors, described, strict=True)):
                running = actor.serve.remote(address, self._key, rank)
                location = RankLocation(host, our_host, pid)
                ends = accept_rank(listener, rank, location)
                ranks.append(RayRank(rank, ends, actor, running, location))
            return ranks

    def rendezvous(self, name: str) -> str:
        return self._rendezvous[name]

    def close(self) -> None:
        ray = _ray()
        ray.util.remove_placement_group(self._placement_group)

    def _choose_rendezvous(self, actors: Sequence[Any], hosts: Sequence[str]) -> None:
        """Choose the rendezvous of each group: a port on the host of its first rank."""
        leaders: dict[str, int] = {}
        for info in self._rank_infos:
            for name in info.group_names:
                leaders.setdefault(name, info.number)
        led = Counter(leaders.values())
        asked = [actors[rank].find_ports.remote(count) for rank, count in led.items()]
        found = _ray().get(asked, timeout=_CONNECT_TIMEOUT_S)
        ports = dict(zip(led, found, strict=True))
        self._rendezvous = {
            name: f"tcp://{hosts[rank]}:{ports[rank].pop()}" for name, rank in leaders.items()
        }

    def _actor(self, rank: int) -> Any:
        ray = _ray()
        strategies = ray.util.scheduling_strategies
        amounts = dict(self._bundle)
        settings = {"num_cpus": amounts.pop("CPU"), "num_gpus": amounts.pop("GPU", 0)}
        return (
            ray.remote(RankActor)
            .options(
                **settings,
                resources=amounts,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._placement_group, rank // self._ranks_per_bundle
                ),
                runtime_env={"env_vars": {"PYTHONPATH": import_path()}},
            )
            .remote()
        )


def accept_rank(
    listener: AuthenticatedListener, rank: int, location: RankLocation
) -> tuple[Connection, Connection]:
    """Accept a rank's connections, for orders and for messages.

    Raises:
        EngineDead: the rank did not connect in time.
    """
    ends: dict[bool, Connection] = {}
    try:
        while len(ends) < 2:
            connection = listener.accept(_CONNECT_TIMEOUT_S)
            hello = receive_message(connection, _CONNECT_TIMEOUT_S)
            assert isinstance(hello, RankHello), f"a rank says {hello}"
            ends[hello.is_orders] = connection
    except (EOFError, OSError) as exc:
        raise EngineDead(
            f"rank {rank} on {location.host} did not connect to {location.our_host} within "
            f"{_CONNECT_TIMEOUT_S:g} s: check that it can reach this host"
        ) from exc
    await_slow_reader(ends[True])
    logger.info("rank %d runs on %s, process %d", rank, location.host, location.pid)
    return ends[True], ends[False]


def _ray() -> Any:
    """Import Ray, only when it is used. ``Any``, as Ray declares few types."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def _connect(address: str) -> Any:
    # Ray sends usage statistics to its vendor unless this is set.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = _ray()
    except ImportError as exc:
        raise ConfigError("--executor ray needs Ray: pip install 'ray>=2.40'") from exc
    try:
        ray.init(address=address or None, ignore_reinit_error=True, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"no Ray cluster at {address or 'this host'}: {exc}") from exc
    return ray
